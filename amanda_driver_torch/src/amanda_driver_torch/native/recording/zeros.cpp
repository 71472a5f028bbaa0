#include "recording/zeros.h"

#include <cmath>
#include <vector>

#include "gradients/graphs.h"
#include "recording/rows.h"
#include "torch_symbols.h"

// GCC computes loops in vectors at this level only.
#if defined(__GNUC__) && !defined(__clang__)
#define IN_VECTORS __attribute__((optimize("O3")))
#else
#define IN_VECTORS
#endif

namespace amanda {

namespace {

struct Zeros {
    long long zeros = 0, small = 0;
};

template <class Element>
IN_VECTORS Zeros count(const uint8_t* data, int64_t elements, double limit) {
    auto* values = reinterpret_cast<const Element*>(data);
    auto bound = Element(limit);
    Zeros found;
    // In parts whose numbers fit into 32 bits, so that they are counted in vectors.
    constexpr int64_t PART = 1 << 16;
    for (int64_t begin = 0; begin < elements; begin += PART) {
        int64_t end = begin + PART < elements ? begin + PART : elements;
        uint32_t zeros = 0, small = 0;
        for (int64_t i = begin; i < end; ++i) {
            zeros += values[i] == 0;
            small += std::fabs(values[i]) < bound;
        }
        found.zeros += zeros;
        found.small += small;
    }
    return found;
}

PyObject* count_zeros(PyObject*, PyObject* args) {
    PyObject* value;
    double limit;
    if (!PyArg_ParseTuple(args, "Od", &value, &limit)) return nullptr;
    void* const* tensor = can_read_memory() ? tensor_in(value) : nullptr;
    Memory memory = tensor == nullptr ? Memory() : memory_of(*tensor);
    bool is_single = memory.dtype == kFloat;
    if (memory.data == nullptr || !(is_single || memory.dtype == kDouble)) Py_RETURN_NONE;
    Zeros found;
    Py_BEGIN_ALLOW_THREADS;
    std::vector<uint8_t> scratch;
    const uint8_t* data = in_order(memory, scratch);
    found = is_single ? count<float>(data, memory.elements, limit)
                      : count<double>(data, memory.elements, limit);
    Py_END_ALLOW_THREADS;
    return Py_BuildValue("LL", found.zeros, found.small);
}

PyMethodDef methods[] = {
    {"count_zeros", count_zeros, METH_VARARGS,
     "count_zeros(tensor, limit, /)\n--\n\n"
     "Return how many elements are zero, and how many have a magnitude below the limit. None for a "
     "tensor that is not read here."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_zeros(PyObject* module) { return PyModule_AddFunctions(module, methods); }

}  // namespace amanda
