// Finds the slots of records.
#include "record.h"

#include <structmember.h>

#include "owned.h"

namespace amanda {

Py_ssize_t idle_epoch_at, idle_nodes_at, program_at, hooks_at;

namespace {

// Finds an entry of `__slots__`. False with an exception.
bool find_slot(PyObject* type, const char* name, Py_ssize_t* offset) {
    Owned descriptor(PyObject_GetAttrString(type, name));
    if (!descriptor) return false;
    if (!Py_IS_TYPE(descriptor.get(), &PyMemberDescr_Type)) {
        PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
        return false;
    }
    *offset = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
    return true;
}

}  // namespace

bool find_slots(PyObject* type) {
    return find_slot(type, "idle_epoch", &idle_epoch_at) &&
           find_slot(type, "program", &program_at) && find_slot(type, "hooks", &hooks_at) &&
           find_slot(type, "idle_nodes", &idle_nodes_at);
}

}  // namespace amanda
