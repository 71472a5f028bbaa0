// The gradients of an op that a program executes.
#include "programs/program_gradients.h"

#include <algorithm>

#include "gradients/hooking.h"
#include "programs/operator_call.h"
#include "torch_symbols.h"
#include "watch.h"

namespace amanda {

namespace {

PyObject *requires_grad, *is_leaf, *ndim, *dtype_name, *is_contiguous, *shape_name, *base_name;

// Returns true if `value` is an argument of the call, or in a list among these.
bool is_operand(const Operands& operands, PyObject* value) {
    PyObject* values[MOST_OPERANDS];
    size_t count = flatten(operands, values);
    return std::any_of(values, values + count, [&](PyObject* one) {
        if (!PyTuple_Check(one) && !PyList_Check(one)) return one == value;
        PyObject** items = PySequence_Fast_ITEMS(one);
        return std::find(items, items + PySequence_Fast_GET_SIZE(one), value) !=
               items + PySequence_Fast_GET_SIZE(one);
    });
}

// Returns a tensor among the arguments; null if a list is too short.
PyObject* at(At place, PyObject* const* values) {
    PyObject* value = values[place.argument];
    if (place.item < 0) return value;
    return place.item < PySequence_Fast_GET_SIZE(value)
               ? PySequence_Fast_GET_ITEM(value, place.item)
               : nullptr;
}

// Returns a copy of a list or tuple with another item.
Owned with_item(PyObject* list, int item, PyObject* value) {
    Owned copy(PySequence_List(list));
    if (!copy || PyList_SetItem(copy.get(), item, Py_NewRef(value)) < 0) return Owned();
    return PyTuple_Check(list) ? Owned(PyList_AsTuple(copy.get())) : std::move(copy);
}

// Returns true if an attribute of an object is `expected`; false, too, if it cannot be read.
bool has(PyObject* object, PyObject* name, PyObject* expected) {
    Owned found(object != nullptr ? PyObject_GetAttr(object, name) : nullptr);
    if (!found) PyErr_Clear();
    return found.get() == expected;
}

// Returns true if a tensor requires a gradient as `expected`; false, too, if it is none.
bool requires_as(PyObject* value, bool expected) {
    void* const* tensor = value != nullptr ? tensor_in(value) : nullptr;
    if (tensor != nullptr) return requires_gradient(*tensor) == expected;
    return has(value, requires_grad, expected ? Py_True : Py_False);
}

// Returns an output; null if there are fewer.
PyObject* output_of(PyObject* returned, size_t number) {
    if (!PyTuple_Check(returned) && !PyList_Check(returned)) {
        return number == 0 ? returned : nullptr;
    }
    return Py_ssize_t(number) < PySequence_Fast_GET_SIZE(returned)
               ? PySequence_Fast_GET_ITEM(returned, Py_ssize_t(number))
               : nullptr;
}

}  // namespace

size_t flatten(const Operands& operands, PyObject** values) {
    size_t count = 0;
    if (operands.first != nullptr) values[count++] = operands.first;
    for (Py_ssize_t i = 0; i < operands.count; ++i) values[count++] = operands.items[i];
    for (Py_ssize_t i = 0; operands.names != nullptr && i < operands.named(); ++i) {
        values[count++] = operands.items[operands.count + i];
    }
    if (operands.kwargs != nullptr) {
        PyObject *name, *value;
        for (Py_ssize_t i = 0; PyDict_Next(operands.kwargs, &i, &name, &value);) {
            values[count++] = value;
        }
    }
    return count;
}

bool requires_the_same(const ProgramParts& parts, PyObject* const* values) {
    if (parts.in_place && !has(values[0], base_name, Py_None)) return false;
    for (const auto& [argument, length] : parts.lengths) {
        if (PySequence_Fast_GET_SIZE(values[argument]) != length) return false;
    }
    for (const auto& [place, answer] : parts.required) {
        if (!requires_as(at(place, values), answer)) return false;
    }
    return true;
}

Owned call_tapped(const ProgramParts& parts, Watch* watch, Call& call) {
    PyObject* values[MOST_OPERANDS + 1];
    values[0] = nullptr;  // The callee may use the place before the first argument.
    PyObject** operands = values + 1;
    flatten(call.operands(), operands);
    std::vector<Owned> held, tapped, lists;
    for (const ProgramParts::Tap& tap : parts.taps) {
        Owned wanted(PyTuple_New(Py_ssize_t(tap.arguments.size())));
        if (!wanted) return Owned();
        for (size_t i = 0; i < tap.arguments.size(); ++i) {
            PyTuple_SET_ITEM(wanted.get(), Py_ssize_t(i), Py_NewRef(at(tap.arguments[i], operands)));
        }
        Owned identities(
            PyObject_CallFunctionObjArgs(watch->tap, wanted.get(), tap.function.get(), nullptr));
        if (!identities) return Owned();
        if (!PyTuple_Check(identities.get()) ||
            PyTuple_GET_SIZE(identities.get()) != Py_ssize_t(tap.arguments.size())) {
            PyErr_SetString(PyExc_SystemError, "a tap returned something else");
            return Owned();
        }
        for (size_t i = 0; i < tap.arguments.size(); ++i) {
            PyObject* identity = PyTuple_GET_ITEM(identities.get(), Py_ssize_t(i));
            const At& place = tap.arguments[i];
            if (place.item >= 0) {
                lists.push_back(with_item(operands[place.argument], place.item, identity));
                if (!(identity = lists.back().get())) return Owned();
            }
            operands[place.argument] = identity;
        }
        held.push_back(std::move(identities));
        tapped.push_back(std::move(wanted));
    }
    Owned returned(call.original_with(operands));
    for (size_t i = 0; returned && i < held.size(); ++i) {
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(held[i].get()); ++j) {
            if (PyTuple_GET_ITEM(held[i].get(), j) == returned.get()) {
                return Owned(Py_NewRef(PyTuple_GET_ITEM(tapped[i].get(), j)));
            }
        }
    }
    return returned;
}

// Returns which dimensions are of size one, as bits.
int ones_of(void* const& tensor) {
    const int64_t* sizes = sizes_of(tensor);
    int64_t count = sizes != nullptr ? layout_of(tensor).dimensions : 0;
    int ones = 0;
    for (int64_t i = 0; i < count; ++i) ones |= int(sizes[i] == 1) << i;
    return ones;
}

bool laid_the_same(const ProgramParts& parts, PyObject* const* values) {
    if (parts.autocast.get() != Py_None) {
        Owned cast(PyObject_CallNoArgs(parts.autocast.get()));
        if (cast.get() != Py_False) {
            PyErr_Clear();
            return false;
        }
    }
    for (const ProgramParts::Laid& laid : parts.laid) {
        PyObject* value = at(laid.at, values);
        if (value == nullptr) return false;
        void* const* tensor = tensor_in(value);
        if (laid.ones >= 0 && (tensor == nullptr || ones_of(*tensor) != laid.ones)) return false;
        TensorLayout found = tensor != nullptr ? layout_of(*tensor) : TensorLayout();
        if (tensor != nullptr && laid.type >= 0) {
            if (found.dimensions != laid.dimensions || found.dtype != laid.type ||
                found.is_contiguous != laid.contiguous) {
                return false;
            }
            continue;
        }
        Owned dimensions(PyObject_GetAttr(value, ndim)), dtype(PyObject_GetAttr(value, dtype_name)),
            contiguous(PyObject_CallMethodNoArgs(value, is_contiguous));
        if (!dimensions || !dtype || !contiguous ||
            PyLong_AsLong(dimensions.get()) != laid.dimensions ||
            dtype.get() != laid.dtype.get() ||
            (contiguous.get() == Py_True) != laid.contiguous) {
            PyErr_Clear();
            return false;
        }
        laid.type = found.dtype;
    }
    return true;
}

namespace {

// Returns the shape of a tensor.
Owned shape_of(PyObject* value) {
    void* const* tensor = tensor_in(value);
    const int64_t* sizes = tensor != nullptr ? sizes_of(*tensor) : nullptr;
    if (sizes == nullptr) return Owned(PyObject_GetAttr(value, shape_name));
    Py_ssize_t count = Py_ssize_t(layout_of(*tensor).dimensions);
    Owned shape(PyTuple_New(count));
    for (Py_ssize_t i = 0; shape && i < count; ++i) {
        PyObject* size = PyLong_FromLongLong(sizes[i]);
        if (size == nullptr) return Owned();
        PyTuple_SET_ITEM(shape.get(), i, size);
    }
    return shape;
}

// Returns a hook for one execution, whose inputs are `arguments` among `values`.
Owned make_reshaping(const Hooking& hooking, const std::vector<At>& arguments,
                     PyObject* const* values) {
    Owned shapes(PyTuple_New(Py_ssize_t(arguments.size())));
    for (size_t k = 0; shapes && k < arguments.size(); ++k) {
        bool reshaped = hooking.steps->ways[k].reshapes();
        Owned shape = reshaped ? shape_of(at(arguments[k], values)) : Owned::share(Py_None);
        if (!shape) return Owned();
        PyTuple_SET_ITEM(shapes.get(), Py_ssize_t(k), shape.release());
    }
    return shapes ? hooking.make(shapes.get()) : Owned();
}

}  // namespace

int find_meetings(const ProgramParts& parts, PyObject* returned, uint64_t start, bool in_graph,
                  Meetings* found) {
    if (next_sequence_number() - start != uint64_t(parts.made)) return 0;
    found->in_graph =
        in_graph && std::all_of(parts.gradient_nodes.begin(), parts.gradient_nodes.end(),
                                [&](const Hooking& gradient_node) {
                                    Node* path[Route::MOST];
                                    return gradient_node.route.find(returned, start, path);
                                });
    if (found->in_graph) return 1;
    for (const Hooking& gradient_node : parts.gradient_nodes) {
        std::vector<Owned> path;
        if (!gradient_node.route.follow(returned, start, &path)) return PyErr_Occurred() ? -1 : 0;
        found->nodes.push_back(std::move(path.back()));
    }
    return 1;
}

bool hook_meetings(const ProgramParts& parts, const Call& call, PyObject* returned, uint64_t start,
                   const Meetings& found) {
    if (!found.in_graph && found.nodes.empty()) return true;
    PyObject* values[MOST_OPERANDS];
    flatten(call.operands(), values);
    for (size_t i = 0; i < parts.gradient_nodes.size(); ++i) {
        const Hooking& hooking = parts.gradient_nodes[i];
        SharedHook hook = hooking.hook ? hooking.hook
                                       : share_hook(make_reshaping(hooking, parts.shaped[i], values));
        if (!hook) return false;
        Owned node;
        if (found.in_graph) {
            // A routine may have separated the result from its node; then nothing is left to hook.
            Node* path[Route::MOST];
            if (!hooking.route.find(returned, start, path)) continue;
            Node* last = path[hooking.route.places.size() - 1];
            if (can_hook_in_graph(last, Seen::GIVEN)) {
                hook_in_graph(last, hook, Seen::GIVEN);
                continue;
            }
            std::vector<Owned> objects;
            if (!hooking.route.follow(returned, start, &objects)) return !PyErr_Occurred();
            node = std::move(objects.back());
        } else {
            node = Owned::share(found.nodes[i].get());
        }
        if (!hook_node(node.get(), hook.get(), Seen::GIVEN)) return false;
    }
    return true;
}

bool arrives_the_same(const ProgramParts& parts, const Call& call, PyObject* returned) {
    if (!parts.arrives) return true;
    size_t count = parts.made_outputs.size();
    if (output_of(returned, count) != nullptr) return false;
    for (size_t i = 0; i < count; ++i) {
        PyObject* output = output_of(returned, i);
        if (output == nullptr) return false;
        // An op that returns its own input made no node.
        bool made = requires_as(output, true) &&
                    (parts.in_place || !is_operand(call.operands(), output));
        if (made != parts.made_outputs[i]) return false;
    }
    return true;
}

bool hook_arrivals(const ProgramParts& parts, PyObject* returned) {
    for (const Hooking& arrival : parts.arrivals) {
        PyObject* output = output_of(returned, size_t(arrival.steps->ways[0].position));
        bool hooked = arrival.steps->seen == Seen::ARRIVING
                          ? hook_tensor(output, arrival.hook)
                          : hook_node_of(output, arrival.hook);
        if (!hooked) return false;
    }
    return true;
}

bool collects(PyObject* tensor) {
    Owned required(PyObject_GetAttr(tensor, requires_grad));
    Owned leaf(required.get() == Py_True ? PyObject_GetAttr(tensor, is_leaf) : nullptr);
    if (PyErr_Occurred()) PyErr_Clear();
    return leaf.get() == Py_True;
}

void name_gradient_strings() {
    is_leaf = PyUnicode_InternFromString("is_leaf");
    requires_grad = PyUnicode_InternFromString("requires_grad");
    ndim = PyUnicode_InternFromString("ndim");
    dtype_name = PyUnicode_InternFromString("dtype");
    is_contiguous = PyUnicode_InternFromString("is_contiguous");
    shape_name = PyUnicode_InternFromString("shape");
    base_name = PyUnicode_InternFromString(kBase);
}

}  // namespace amanda
