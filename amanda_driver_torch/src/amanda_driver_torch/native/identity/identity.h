// The identity of a call: the process-local key of its site, and the record of its op.
//
// The rule is that of `amanda_core.identity.sites.Sites`, which names new sites, and of `amanda_identity.h`.
// Only its results are cached here: a hash of the same numbers (op type, frames, operands) leads to
// the same record. Within a scope the sequence of the last activation is expected, and each of its
// steps is verified.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "amanda_identity.h"
#include "owned.h"
#include "table.h"

// In these versions of Python the interpreter counts the changes of each dict.
#if PY_VERSION_HEX < 0x030C0000 && !defined(AMANDA_PUBLIC_FRAMES)
#define AMANDA_DICT_VERSIONS 1
#endif

namespace amanda {

struct Thread;

// Changes when another object may have an address that was part of a fingerprint.
extern uint64_t generation;

// An op as one occurrence of its site in one scope.
struct Entry {
    long references = 0;
    uint64_t hash = 0;  // without scope and occurrence
    Owned record;
};

// A step of a sequence, with everything that an op without a plan needs.
struct Step {
    uint64_t fingerprint = 0;        // of the call that led here last; 0 for none
    PyObject* idle_epoch = nullptr;  // in which the op was found idle; only to be compared
    long long idle_nodes = 0;        // how many nodes it made then
    uint64_t hash = 0;
    Shared<Entry> entry;
};

struct Sequence {
    long references = 0;
    std::vector<Step> steps;
};

// A link from a module to a child that it holds by a name.
struct Link {
    Owned owner;  // weak
    PyObject* address = nullptr;  // of the owner, borrowed: only to be compared
    Owned name;
#if AMANDA_DICT_VERSIONS
    // As last read: versions of the owner's attributes and of its `_modules`.
    uint64_t attributes_version = 0, modules_version = 0;
    PyObject* modules = nullptr;
#endif

    // Returns true if `holder`, which is the owner and alive, still holds the child.
    INLINE bool holds(PyObject* holder, PyObject* module) {
        PyObject** place = _PyObject_GetDictPtr(holder);
        PyObject* attributes = place != nullptr ? *place : nullptr;
        if (attributes == nullptr) return false;
#if AMANDA_DICT_VERSIONS
        // While the attributes are unchanged, `modules` belongs to them and is alive.
        if (modules != nullptr && version(attributes) == attributes_version &&
            version(modules) == modules_version) {
            return true;
        }
#endif
        return is_among(attributes, module);
    }

  private:
#if AMANDA_DICT_VERSIONS
    static uint64_t version(PyObject* dict) {
        return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
    }
#endif
    // Returns true if the child that `attributes` have by this name is `module`.
    bool is_among(PyObject* attributes, PyObject* module);
};

struct ScopeInfo {
    struct Child {
        Owned module;  // weak
        Shared<ScopeInfo> info;
        bool held = false;
        Link link;                // if `held`: the link to the module,
        std::vector<Link> links;  // and the links above it, up to the scope of `info`

        // Returns true if a call of `called` from `caller`, which may be null, enters `info`.
        INLINE bool is(PyObject* called, PyObject* caller) {
            if (!leads_to(module, called)) return false;
            if (!held) return true;
            if (link.address == caller && links.empty()) return link.holds(caller, called);
            return is_held(called);
        }

      private:
        // Checks each module of the chain up to the parent of `info`.
        bool is_held(PyObject* called);
    };

    long references = 0;
    long number = 0;
    bool inside = false;  // inside a root module
    bool suspended = false;  // by `set_aside`; nothing is to be expected meanwhile
    Owned scope;
    Shared<Sequence> last;
    const Step* steps = nullptr;  // of `last`, to be prefetched
    Table<Child> children;
    std::vector<Child> order;  // the children in the order of their last calls

    void expect(const Shared<Sequence>& sequence) {
        last = sequence;
        steps = sequence ? sequence->steps.data() : nullptr;
    }
    void prefetch() const {
        if (last) {
            __builtin_prefetch(last.get());
            __builtin_prefetch(steps);
        }
    }
};

struct Progress {
    Shared<ScopeInfo> info;
    Shared<Sequence> expected;  // or, if not `in_step`, the actual steps
    size_t position = 0, size = 0;  // in `steps`, which are those of `expected` while `in_step`
    Step* steps = nullptr;
    size_t child = 0;  // number of modules of `order` that have been called
    bool begun = false;  // `expected` has been looked up
    bool in_step = true;
    Table<uint32_t> counts;
    const void* bound = nullptr;  // the frame that called the module, if known
    PyObject* module = nullptr;   // borrowed, and alive as long as its call lasts
    Owned frame;                  // that entered a zone outside of all modules, if known
    uint64_t around = 0;          // where that frame was called

    // Returns true if the order of the ops is that of the last time, as a rule.
    bool is_followed() const { return info->inside || frame; }
    // Returns where the addresses of instructions begin to be the same for all ops.
    INLINE const void* end() const {
        return frame ? amanda_frame_around(amanda_frame_of(frame.get())) : bound;
    }
    void begin() {
        begun = true;
        if (info->inside) frame = Owned();
        expected = info->last;
        if (!expected || !is_followed()) return;
        steps = expected->steps.data();
        size = expected->steps.size();
    }
};

// One call of a module. It is a Python object, because STATE.activations lists them.
struct Activation {
    PyObject_HEAD
    PyObject* own_scope;  // if there is no `info` yet
    Progress progress;

    PyObject* scope() const { return progress.info ? progress.info->scope.get() : own_scope; }
};

// The arguments of a call as the identity rule reads them.
struct Operands {
    PyObject* first;  // `self` of a method, or null
    PyObject* const* items;
    Py_ssize_t count;
    PyObject* kwargs;           // a dict or null
    PyObject* names = nullptr;  // or a tuple: the values follow the items

    Py_ssize_t named() const {
        if (names != nullptr) return PyTuple_GET_SIZE(names);
        return kwargs != nullptr ? PyDict_GET_SIZE(kwargs) : 0;
    }
    // Returns a positional or keyword argument by number, or null.
    PyObject* at(Py_ssize_t i) const;
    // Returns the keyword arguments as a dict; a new reference.
    PyObject* keywords() const;
    // Calls a function with each value until it returns false; returns what it returned last.
    template <class Visit>
    INLINE bool each(Visit visit) const {
        if (first != nullptr && !visit(first)) return false;
        Py_ssize_t last = count + (names != nullptr ? PyTuple_GET_SIZE(names) : 0);
        for (Py_ssize_t i = 0; i < last; ++i) {
            if (!visit(items[i])) return false;
        }
        PyObject *name, *value;
        for (Py_ssize_t i = 0; kwargs != nullptr && PyDict_Next(kwargs, &i, &name, &value);) {
            if (!visit(value)) return false;
        }
        return true;
    }
};

struct OpType {
    long number;
    PyObject* name;
};

class Identity {
  public:
    Owned classify, look_up, resolve, region;  // of the core's `Sites` and `Labels`
    Owned is_weight;                         // while the user's modes would see what is read
    PyObject *parameter = nullptr, *tensor = nullptr;  // types, borrowed from torch

    // Returns the entry of the op that is being called, borrowed; null with an exception, or
    // without one to ignore the op. `step` is where it is expected next time, if that is known
    // already.
    Entry* locate(Thread* thread, const OpType& type, const Operands& operands, bool* look_away,
                  Step** step);
    ScopeInfo* info_of(PyObject* scope);
    // The outermost modules that were called.
    Table<ScopeInfo::Child> roots;
    // Drops all records. Activations keep their counts.
    void forget();
    // Moves what may lead to the session to a list: the garbage collector does not know what is
    // held here. False with an exception.
    bool set_aside(PyObject* list);
    // Takes it back. False, perhaps with an exception, if the list is not that of `set_aside`.
    bool take_back(PyObject* list);
    // Returns false only if a plain tensor at a position outside of all modules does not
    // distinguish ops.
    COLD bool may_be_weight(PyObject* value, Py_ssize_t position) const;

  private:
    struct Code {
        // The place from which a frame calls, valid as long as the program runs.
        int offset_of(AmandaFrame* frame) const {
            return amanda_call_offset(opcodes.get(), amanda_frame_unit(frame));
        }

        Owned code;  // `Code` of `amanda_core.identity.sites`, which holds the code object
        Owned opcodes;  // bytes
        long kind = 0;
        uint64_t number = 0;
        bool zoned = true;  // It may decide the zone of the ops that it calls.
    };
    struct Type {
        Owned type;
        bool parameter = false;
        bool marked = false;  // Its values are weights if they are marked.
    };
    struct Token {
        Owned tensor;  // weak
        uint64_t number = 0;
    };

    bool is_plain(PyObject* value, Py_ssize_t position, bool inside);
    bool hash_site(AmandaFrame*, const void* bound, bool inside, uint64_t* hash, bool* quiet);
    // The last argument, if not null, is a list that gets the weights: position, token, weight.
    bool hash_operands(const Operands&, bool inside, PyObject* regions, uint64_t* hash,
                       PyObject* weights = nullptr);
    bool are_ordinary(const Operands&) const;
    bool hash_operand(PyObject* value, Py_ssize_t position, bool inside, PyObject* regions,
                      uint64_t* hash, PyObject* weights);
    Code* code_of(PyObject* code, PyObject* globals);
    Entry* resolve_new(Thread*, const OpType&, const Operands&, PyObject* scope, const void* bound,
                       bool inside, uint64_t hash, uint64_t key, uint32_t occurrence,
                       uint64_t site);
    // Calls a function with each reference that may lead to the session.
    template <class Visit>
    void each_reference(Visit visit) {
        entries_.each([&](Shared<Entry>& entry) { visit(entry->record); });
        types_.each([&](Type& type) { visit(type.type); });
    }
    Owned frames_of(Thread*, const void* bound, bool inside, bool* zoned);
    // The user's innermost frame, however far out; None if there is none.
    Owned users_frame(Thread*);

    Table<Code> codes_;
    Table<Token> tokens_;
    Table<Type> types_;
    Table<Shared<Entry>> entries_;
    uint64_t deaths_ = 0;  // How many weights had died when it was last rebuilt.
    Shared<Entry> passing_;  // The last one that is looked up again next time.
    Table<Shared<ScopeInfo>> scopes_;
    // Sites that read regions of parameters -> their number in `Sites`.
    Table<Owned> regional_;
};

// The sequence that the innermost activation follows.
inline const Shared<Sequence>& sequence_of(PyObject* activations) {
    PyObject* last = PyList_GET_ITEM(activations, PyList_GET_SIZE(activations) - 1);
    return reinterpret_cast<Activation*>(last)->progress.expected;
}

int add_identity(PyObject* module);
int add_activation(PyObject* module);
Activation* new_activation(PyObject* scope, ScopeInfo* info, const void* bound,
                           PyObject* frame = nullptr);
bool is_activation(PyObject* object);

}  // namespace amanda
