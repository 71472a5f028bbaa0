// Edits of values.
#include "programs/edits.h"

#include "watch.h"

namespace amanda {

bool Edits::make(Watch* watch, const ProgramStep& step, size_t number, PyObject* values,
                 PyObject* result, bool aliases) {
    results_.resize(number + 1);
    results_[number] = Owned::share(result);
    Owned edit = Owned::share(watch->edit);
    PyObject* args[] = {step.step.get(), values, result, aliases ? Py_True : Py_False};
    return bool(Owned(PyObject_Vectorcall(edit.get(), args, 4, nullptr)));
}

Owned Edits::so_far(size_t count, PyObject* last) const {
    Owned tuple(results(count, last));
    for (size_t i = 0; tuple && i < results_.size(); ++i) {
        if (results_[i]) {
            PyTuple_SetItem(tuple.get(), Py_ssize_t(i), Py_NewRef(results_[i].get()));
        }
    }
    return tuple;
}

}  // namespace amanda
