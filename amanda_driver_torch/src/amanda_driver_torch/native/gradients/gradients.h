// Routines for gradients, called without a Python frame. Python handles changes made by routines,
// and all other special cases.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "gradients/graphs.h"
#include "gradients/routes.h"
#include "steps.h"
#include "torch_symbols.h"

namespace amanda {

// The arguments of a hook, and the values that its routines get.
enum class Seen {
    ARRIVING,  // (gradient of a tensor): the gradient, at the position of the op's output
    TOGETHER,  // (gradients before a node): those of the op's outputs
    BEFORE,    // (gradients before a node): all of them
    AFTER,     // (results of a node, gradients before it): the results
    GIVEN,     // like AFTER: the gradients of an op's inputs, made of the results
};

// The steps of a plan, shared with the hooks of its executions. A hook must not keep a routine
// alive: its tool may hold tensors that lead back to the hooked node through C++ nodes, which the
// garbage collector cannot follow.
struct GradientSteps {
    // How to make the gradient of an input from a node's result.
    enum class Change { NONE, RESHAPE, TRANSPOSE, PERMUTE };
    static constexpr size_t MOST_ORDERED = 10;  // each dimension is a digit
    struct Way {
        int position;
        int item;  // in a list; -1 if it is the input itself
        int index;
        Change change;
        bool is_read;  // by any step
        // PERMUTE: the order of the input's dimensions in the result, which is reshaped first.
        std::vector<uint8_t> order;

        bool reshapes() const { return change == Change::RESHAPE || change == Change::PERMUTE; }
    };

    long references = 0;
    Seen seen = Seen::ARRIVING;
    PyObject* owner = nullptr;  // borrowed; null once it is destroyed together with the steps
    // BEFORE, AFTER: whether the node is not analysed yet, so that Python does everything.
    bool analyses = false;
    std::vector<ProgramStep> steps;
    Owned epoch;  // in which they are valid
    Owned watch;
    // GIVEN: the number of inputs, and how to make some of their gradients. ARRIVING, TOGETHER: the
    // number of outputs, and which of the gradients is of which.
    int count = 0;
    std::vector<Way> ways;
    bool computes = false;  // whether any of `ways` changes a result
    std::vector<std::pair<int, Py_ssize_t>> lengths;  // of the inputs that are lists
    // BEFORE, AFTER: the context's data of an execution, and its op.
    Owned execution, op;
    // BEFORE, AFTER at the accumulation into a leaf: a list that is empty once the session has
    // ended, since the node may live on.
    Owned life;
    bool needs_context = true;  // whether any of `steps` may read it
    bool needs_values = true;   // whether any of `steps` gets one

    bool is_over() const { return life && PyList_GET_SIZE(life.get()) == 0; }
    void forget();
    // Returns true if any of `ways` needs the shape of its input.
    bool reshapes() const;
    int traverse(visitproc visit, void* arg) const;
};

// A hook that graphs share. They may be destroyed without the GIL, which only the last one needs.
using SharedHook = std::shared_ptr<PyObject>;
SharedHook share_hook(Owned hook);  // null for null

// One hook per execution, or one for all.
struct Hooking {
    Owned function;  // does everything in Python; also accepts the results of the first routines
    SharedHook hook;      // null if each execution needs its own, since gradients are reshaped
    Shared<GradientSteps> steps;
    Route route;      // GIVEN: to the node
    int place = 0;    // BEFORE, AFTER: of the node in the route of its op

    // Reads (function, steps, count, ways) for ARRIVING, or TOGETHER if there are several ways;
    // (function, steps, route, count, ways, lengths) for GIVEN; (function, steps, place, execution,
    // op) for BEFORE and AFTER, with None for the execution of a node that is not analysed yet. False
    // with an exception.
    bool read(Seen seen, PyObject* parts, PyObject* owner, PyObject* epoch, PyObject* watch);
    // The hook of one execution, which holds `own`. GIVEN: for each of `ways` the shape of the
    // input, or None if its gradient is not reshaped.
    Owned make(PyObject* own) const;
};

// A hook, which torch or Python calls.
struct GradientHook {
    PyObject_HEAD
    PyObject *function, *own;  // own: see `Hooking::make`
    Shared<GradientSteps> steps;
};

// The gradients with which a hook is called, by Python or by torch.
class Arriving {
  public:
    explicit Arriving(PyObject* tuple) : tuple_(tuple) {}
    explicit Arriving(const Gradients& gradients) : gradients_(&gradients) {}

    size_t size() const {
        return tuple_ != nullptr ? size_t(PyTuple_GET_SIZE(tuple_)) : gradients_->size();
    }
    Owned operator[](size_t number) const {
        return tuple_ != nullptr ? Owned::share(PyTuple_GET_ITEM(tuple_, Py_ssize_t(number)))
                                 : Owned(wrap((*gradients_)[number]));
    }
    Owned list() const {
        Owned values(PyList_New(Py_ssize_t(size())));
        for (size_t i = 0; values && i < size(); ++i) {
            Owned value = (*this)[i];
            if (!value) return value;
            PyList_SET_ITEM(values.get(), Py_ssize_t(i), value.release());
        }
        return values;
    }

  private:
    PyObject* tuple_ = nullptr;
    const Gradients* gradients_ = nullptr;
};

// The results of a node that routines have edited, by their number.
using EditedResults = std::vector<std::pair<size_t, Owned>>;

// Calls the routines of a hook. `before`: the gradients before a node, if the hook comes after it.
// `edited`: gets the edited results; null if Python has to edit. False with an exception, or if Python
// has to go on: from the results in `done`.
bool call_routines(GradientHook* hook, const Arriving& first, const Arriving* before, Owned* done,
                   EditedResults* edited = nullptr);
// Lets Python go on in a hook that was called with `args`; returns what it returns.
PyObject* hand_over(GradientHook* hook, PyObject* args, const Owned& done);

class HoldingGil {
  public:
    HoldingGil() : state_(PyGILState_Ensure()) {}
    ~HoldingGil() { PyGILState_Release(state_); }
    HoldingGil(const HoldingGil&) = delete;
    HoldingGil& operator=(const HoldingGil&) = delete;

  private:
    PyGILState_STATE state_;
};

int add_gradients(PyObject* module);

}  // namespace amanda
