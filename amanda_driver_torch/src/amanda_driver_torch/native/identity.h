// Which op a call is: the process-local key of a site, and the record behind it.
//
// The rule is that of `Sites` of `amanda_core.sites`, which names new sites, and of
// `amanda_identity.h`. Here only its answers are kept: a hash over the same numbers (op type, frames, operands) leads to the same record. Within a scope the
// sequence of the last activation is expected, and each step of it is verified.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "amanda_identity.h"
#include "table.h"

// The interpreter counts the changes of each dict in these versions.
#if PY_VERSION_HEX < 0x030C0000
#define AMANDA_DICT_VERSIONS 1
#endif

namespace amanda {

struct Thread;

// Changes when an address that was part of a fingerprint may be another object's now.
extern uint64_t generation;

// A strong reference; the GIL is held wherever one is dropped.
class Owned {
  public:
    Owned() = default;
    explicit Owned(PyObject* stolen) : object_(stolen) {}
    Owned(const Owned& other) : object_(other.object_) { Py_XINCREF(object_); }
    Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    ~Owned() { Py_XDECREF(object_); }
    Owned& operator=(Owned other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    static Owned share(PyObject* borrowed) { return Owned(Py_XNewRef(borrowed)); }

    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject* object_ = nullptr;
};

// What a weak reference leads to, borrowed; never a new object at the address of a dead one.
inline bool leads_to(const Owned& weak, PyObject* object) {
    // A plain weak reference is the first of its object's list, which lies in memory that the
    // caller needs anyway; the reference itself would be one more miss of the cache.
    Py_ssize_t offset = Py_TYPE(object)->tp_weaklistoffset;
    if (offset > 0 &&
        *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset) == weak.get()) {
        return bool(weak);
    }
    return weak && PyWeakref_GET_OBJECT(weak.get()) == object;
}

// One op as one occurrence of its site in one scope.
struct Entry {
    long references = 0;
    uint64_t hash = 0;  // without scope and occurrence
    Owned record;
};

// A step of a sequence, with all that an op without a plan needs.
struct Step {
    uint64_t fingerprint = 0;        // of the call that led here last; 0 for none
    PyObject* idle_epoch = nullptr;  // in which the op was seen to be idle; to compare only
    long long idle_nodes = 0;        // how many nodes it made then
    uint64_t hash = 0;
    Shared<Entry> entry;
};

struct Sequence {
    long references = 0;
    std::vector<Step> steps;
};

// That some module holds another as a child, by a name.
struct Link {
    Owned owner;  // weak
    PyObject* address = nullptr;  // of the owner, borrowed: only to be compared
    Owned name;
#if AMANDA_DICT_VERSIONS
    // When last looked at: versions of the owner's attributes and of its `_modules`.
    uint64_t attributes_version = 0, modules_version = 0;
    PyObject* modules = nullptr;
#endif

    // Whether `holder`, which is the owner and alive, still does.
    INLINE bool holds(PyObject* holder, PyObject* module) {
        PyObject** place = _PyObject_GetDictPtr(holder);
        PyObject* attributes = place != nullptr ? *place : nullptr;
        if (attributes == nullptr) return false;
#if AMANDA_DICT_VERSIONS
        // While the attributes are as they were, `modules` is theirs, and alive.
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
    // Whether the child that `attributes` have by this name is `module`.
    bool is_among(PyObject* attributes, PyObject* module);
};

struct ScopeInfo {
    struct Child {
        Owned module;  // weak
        Shared<ScopeInfo> info;
        bool held = false;
        Link link;                // if `held`: who holds the module,
        std::vector<Link> links;  // and so on, up to what `info` is a child of

        // Whether a call of `called` out of `caller`, which may be null, enters `info`.
        INLINE bool is(PyObject* called, PyObject* caller) {
            if (!leads_to(module, called)) return false;
            if (!held) return true;
            if (link.address == caller && links.empty()) return link.holds(caller, called);
            return is_held(called);
        }

      private:
        // By each module of the chain up to what `info` is a child of.
        bool is_held(PyObject* called);
    };

    long references = 0;
    long number = 0;
    bool inside = false;  // within some root module
    Owned scope;
    Shared<Sequence> last;
    const Step* steps = nullptr;  // of `last`, to be fetched early
    Table<Child> children;
    std::vector<Child> order;  // the children as they were called last

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
    Shared<Sequence> expected;  // or, once not `in_step`, what has really been passed
    size_t position = 0, size = 0;  // in `steps`, which are those of `expected` while `in_step`
    Step* steps = nullptr;
    size_t child = 0;  // how many of `order` have been called
    bool begun = false;  // `expected` has been looked up
    bool in_step = true;
    Table<uint32_t> counts;
    const void* bound = nullptr;  // the frame that called the module, if known
    PyObject* module = nullptr;   // borrowed, and alive as long as its call lasts

    void begin() {
        begun = true;
        expected = info->last;
        if (!expected || !info->inside) return;
        steps = expected->steps.data();
        size = expected->steps.size();
    }
};

// One call of a module; an object of Python's, because STATE.activations lists them.
struct Activation {
    PyObject_HEAD
    PyObject* own_scope;  // where there is no `info` yet
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
    // A positional or keyword argument by number, or null.
    PyObject* at(Py_ssize_t i) const;
    // New reference: the keyword arguments as a dict.
    PyObject* keywords() const;
};

struct OpType {
    long number;
    PyObject* name;
};

class Identity {
  public:
    Owned classify, look_up, resolve, region;  // of the core's `Sites` and `Labels`
    Owned is_weight;                         // where modes of the user's hear of what is read
    PyObject *parameter = nullptr, *tensor = nullptr;  // types, borrowed from torch

    // The entry of the op that is being called, borrowed; null with an exception, or to look away.
    // `step` is where it is expected next time, if that is known already.
    Entry* locate(Thread* thread, const OpType& type, const Operands& operands, bool* look_away,
                  Step** step);
    ScopeInfo* info_of(PyObject* scope);
    // Outermost modules that were called.
    Table<ScopeInfo::Child> roots;
    // Forgets all records; activations go on from what they have counted.
    void forget();

  private:
    struct Code {
        // Where a frame calls from, as long as the program runs.
        int offset_of(AmandaFrame* frame) const {
            size_t unit = size_t(amanda_frame_unit(frame));
            return unit < offsets.size() ? offsets[unit] : -1;
        }

        Owned code;  // `Code` of `amanda_core.sites`, which holds the code object
        std::vector<int> offsets;
        long kind = 0;
        uint64_t number = 0;
    };
    struct Type {
        Owned type;
        bool parameter = false;
    };
    struct Token {
        Owned tensor;  // weak
        uint64_t number = 0;
    };

    bool is_plain(PyObject* value);
    bool hash_site(Thread*, const void* bound, bool inside, uint64_t* hash, bool* quiet);
    bool hash_operands(const Operands&, bool inside, PyObject* regions, uint64_t* hash);
    bool hash_operand(PyObject* value, Py_ssize_t position, bool inside, PyObject* regions,
                      uint64_t* hash);
    Code* code_of(PyObject* code, PyObject* globals);
    Entry* resolve_new(Thread*, const OpType&, const Operands&, PyObject* scope, const void* bound,
                       bool inside, uint64_t hash, uint64_t key, uint32_t occurrence,
                       uint64_t site);
    Owned frames_of(Thread*, const void* bound, bool inside);

    Table<Code> codes_;
    Table<Token> tokens_;
    Table<Type> types_;
    Table<Shared<Entry>> entries_;
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
Activation* new_activation(PyObject* scope, ScopeInfo* info, const void* bound);
bool is_activation(PyObject* object);

}  // namespace amanda
