// The lookup of `identity.h`.
#include "identity/identity.h"

#include <algorithm>

#include "identity/expect.h"
#include "thread.h"
#include "torch_symbols.h"

namespace amanda {

namespace {

// exec() makes new code objects each time, and modules and tensors may be new, too. The tables are
// rebuilt when they get this large.
constexpr size_t MANY = 16384;
// The sequence of a longer activation is not kept: each step is looked up.
constexpr size_t LONGEST = 65536;
// Entries are of weights, and stay when these die. The table is rebuilt after so many deaths, and
// when as many as half of its entries could be of dead ones.
constexpr uint64_t FEW = 256;
uint64_t deaths = 0;

// Called when a parameter dies; the table of tokens holds the references that call it.
PyObject* parameter_died(PyObject*, PyObject*) {
    ++generation;
    ++deaths;
    Py_RETURN_NONE;
}
PyMethodDef parameter_died_definition = {"parameter_died", parameter_died, METH_O, nullptr};
PyObject* died = nullptr;

long number_of(PyObject* object, const char* name) {
    Owned value(PyObject_GetAttrString(object, name));
    return value ? PyLong_AsLong(value.get()) : -1;
}

bool is_true(PyObject* object, const char* name) {
    Owned value(PyObject_GetAttrString(object, name));
    return value && PyObject_IsTrue(value.get()) == 1;
}

PyObject *requires_grad, *is_leaf, *base_name, *parameter_mark;

bool is_set(PyObject* tensor, PyObject* name) {
    Owned value(PyObject_GetAttr(tensor, name));
    return value.get() == Py_True;
}

// Like `_is_marked` of `identity/rules.py`. False, perhaps with an exception.
bool is_marked(PyObject* value) {
    Owned found(PyObject_GetAttr(value, parameter_mark));
    if (!found && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    return found.get() == Py_True;
}

// Like `reading.is_weight`, for a plain tensor. False, perhaps with an exception.
bool is_plain_weight(PyObject* tensor) {
    if (!is_set(tensor, requires_grad)) return false;
    Owned base(PyObject_GetAttr(tensor, base_name));
    if (!base) return false;
    // Asking a view whether it is a leaf rebuilds its node if its base was written, or raises.
    if (base.get() != Py_None && is_set(base.get(), requires_grad)) return false;
    return PyErr_Occurred() == nullptr && is_set(tensor, is_leaf);
}

}  // namespace

uint64_t generation = 1;

PyObject* Operands::at(Py_ssize_t i) const {
    if (i < count || names != nullptr) return items[i];
    return nullptr;  // Values of a dict do not have positions.
}

PyObject* Operands::keywords() const {
    if (kwargs != nullptr) return Py_NewRef(kwargs);
    PyObject* made = PyDict_New();
    for (Py_ssize_t i = 0; made != nullptr && i < named(); ++i) {
        if (PyDict_SetItem(made, PyTuple_GET_ITEM(names, i), items[count + i]) < 0) Py_CLEAR(made);
    }
    return made;
}

Identity::Code* Identity::code_of(PyObject* code, PyObject* globals) {
    Code* known = codes_.find(key_of(code));
    if (known != nullptr) return known;
    if (codes_.size() > MANY) {
        codes_.clear();
        ++generation;
    }
    Owned made(PyObject_CallFunctionObjArgs(classify.get(), code, globals, nullptr));
    if (!made) return nullptr;
    long kind = number_of(made.get(), "kind"), number = number_of(made.get(), "number");
    Owned opcodes(PyObject_GetAttrString(made.get(), "opcodes"));
    bool zoned = is_true(made.get(), "zoned");
    if (PyErr_Occurred()) return nullptr;
    Code& entry = codes_.at(key_of(code));
    entry.code = std::move(made);
    entry.opcodes = std::move(opcodes);
    entry.kind = kind;
    entry.number = uint64_t(number);
    entry.zoned = zoned;
    return &entry;
}

// Like `Sites.walk`.
bool Identity::hash_site(AmandaFrame* frame, const void* bound, bool inside, uint64_t* hash,
                         bool* quiet) {
    int limit = inside ? AMANDA_SITE_FRAMES : 1;
    bool found = false;
    for (; frame != nullptr && frame != bound; frame = amanda_frame_back(frame)) {
        PyObject* object = reinterpret_cast<PyObject*>(amanda_frame_code(frame));
        Code* code = codes_.find(key_of(object));
        if (code == nullptr &&
            (code = code_of(object, amanda_frame_globals(frame))) == nullptr) {
            return false;
        }
        if (amanda_frame_counts(code->kind, found)) {
            *hash = amanda_hash_frame(*hash, code->number, code->offset_of(frame));
            found = true;
            if (code->kind == AMANDA_USER && --limit == 0) break;
        } else if (code->kind == AMANDA_QUIET) {
            *quiet = true;
            return true;
        } else if (code->kind == AMANDA_STOP) {
            break;
        }
    }
    return true;
}

Owned Identity::frames_of(Thread* thread, const void* bound, bool inside, bool* zoned) {
    Owned frames(PyList_New(0));
    int limit = inside ? AMANDA_SITE_FRAMES : 1;
    *zoned = bound == nullptr;
    for (AmandaFrame* frame = amanda_innermost_frame(thread->state);
         frames && frame != nullptr && frame != bound; frame = amanda_frame_back(frame)) {
        PyObject* object = reinterpret_cast<PyObject*>(amanda_frame_code(frame));
        Code* code = code_of(object, amanda_frame_globals(frame));
        if (code == nullptr) return Owned();
        if (code->kind == AMANDA_STOP) break;
        *zoned = *zoned || code->zoned;
        if (limit == 0) {
            if (*zoned) break;
            continue;  // The other frames of the module's call may decide the zone.
        }
        if (!amanda_frame_counts(code->kind, PyList_GET_SIZE(frames.get()) != 0)) continue;
        Owned pair(Py_BuildValue("(Oi)", code->code.get(), code->offset_of(frame)));
        if (!pair || PyList_Append(frames.get(), pair.get()) < 0) return Owned();
        if (code->kind == AMANDA_USER) --limit;
    }
    return frames;
}

Owned Identity::users_frame(Thread* thread) {
    for (AmandaFrame* frame = amanda_innermost_frame(thread->state); frame != nullptr;
         frame = amanda_frame_back(frame)) {
        Code* code = code_of(reinterpret_cast<PyObject*>(amanda_frame_code(frame)),
                             amanda_frame_globals(frame));
        if (code == nullptr) return Owned();
        if (code->kind == AMANDA_USER) {
            return Owned(Py_BuildValue("(Oi)", code->code.get(), code->offset_of(frame)));
        }
    }
    return Owned::share(Py_None);
}

// Like the operands of `Sites.locate`.
bool Identity::hash_operand(PyObject* value, Py_ssize_t position, bool inside, PyObject* regions,
                            uint64_t* hash, PyObject* weights) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
    bool counts = type == parameter;
    if (!counts && type == tensor) {
        if (regions != nullptr) {
            Owned place(PyLong_FromSsize_t(position));
            if (!place) return false;
            Owned answer(PyObject_CallFunctionObjArgs(way_of(region.get()), regions, place.get(), value,
                                                      nullptr));
            if (!answer) return false;
            uint64_t token = uint64_t(PyLong_AsLong(answer.get()));
            // The token of a region, which the next bit distinguishes from that of a weight.
            if (token != 0) {
                *hash = mix(*hash, token << 16 | uint64_t(position) | uint64_t(3) << 62);
                return true;
            }
        }
        if (!amanda_distinguishes(-1, position, inside)) return true;
        // Weights that are plain tensors, outside of modules.
        if (in_function_modes()) {
            Owned answer(PyObject_CallOneArg(is_weight.get(), value));
            counts = answer.get() == Py_True;
        } else {
            counts = is_plain_weight(value);
        }
        if (PyErr_Occurred()) return false;
    } else if (!counts) {
        Type* known = types_.find(key_of(type));
        if (known == nullptr) {
            if (types_.size() > MANY) {
                types_.clear();
                ++generation;
            }
            known = &types_.at(key_of(type));
            known->type = Owned::share(type);
            known->parameter =
                PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject*>(parameter));
            known->marked =
                PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject*>(tensor));
        }
        counts = known->parameter || (known->marked && is_marked(value));
        if (PyErr_Occurred()) return false;
    }
    if (!counts) return true;
    Token* token = tokens_.find(key_of(value));
    if (token == nullptr || !leads_to(token->tensor, value)) {
        if (tokens_.size() > MANY) {
            tokens_.clear();
            ++generation;
        }
        Owned answer(PyObject_CallOneArg(look_up.get(), value));
        if (!answer) return false;
        Owned weak(PyWeakref_NewRef(value, died));
        if (!weak) return false;
        token = &tokens_.at(key_of(value));
        token->tensor = std::move(weak);
        token->number = uint64_t(PyLong_AsLong(PyTuple_GET_ITEM(answer.get(), 0)));
    }
    *hash = mix(*hash, token->number << 16 | uint64_t(position) | uint64_t(1) << 63);
    if (weights == nullptr) return true;
    Owned found(Py_BuildValue("(nKO)", position, (unsigned long long)token->number, value));
    return found && PyList_Append(weights, found.get()) == 0;
}

bool Identity::hash_operands(const Operands& operands, bool inside, PyObject* regions,
                             uint64_t* hash, PyObject* weights) {
    Py_ssize_t position = 0;
    return operands.each([&](PyObject* value) {
        return hash_operand(value, position++, inside, regions, hash, weights);
    });
}

// Returns true if no operand is or contains a fake tensor, by the types alone.
bool Identity::are_ordinary(const Operands& operands) const {
    auto is_ordinary = [this](PyObject* value) {
        PyTypeObject* type = Py_TYPE(value);
        return reinterpret_cast<PyObject*>(type) == tensor ||
               reinterpret_cast<PyObject*>(type) == parameter || type == &PyLong_Type ||
               type == &PyBool_Type || type == &PyFloat_Type || value == Py_None;
    };
    for (Py_ssize_t i = 0; i < operands.count + (operands.names != nullptr ? operands.named() : 0);
         ++i) {
        if (!is_ordinary(operands.items[i])) return false;
    }
    return operands.kwargs == nullptr && (operands.first == nullptr || is_ordinary(operands.first));
}

bool Identity::may_be_weight(PyObject* value, Py_ssize_t position) const {
    if (!amanda_distinguishes(-1, position, false)) return false;
    if (in_function_modes()) return true;
    Owned found(PyObject_GetAttr(value, requires_grad));
    if (!found) PyErr_Clear();
    return found.get() != Py_False;
}

// Returns whether a value is identified by its type, or is a parameter, which is identified by its
// address.
bool Identity::is_plain(PyObject* value, Py_ssize_t position, bool inside) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
    if (type == tensor) return inside || !may_be_weight(value, position);
    if (type == parameter) return true;
    Type* known = types_.find(key_of(type));
    return known != nullptr && !known->parameter && (inside || !known->marked);
}

Entry* Identity::locate(Thread* thread, const OpType& type, const Operands& operands,
                        bool* look_away, Step** step) {
    Progress* progress = nullptr;
    PyObject* scope = Py_None;
    PyObject* list = thread->activations;
    if (PyList_GET_SIZE(list) != 0) {
        auto* top = reinterpret_cast<Activation*>(PyList_GET_ITEM(list, PyList_GET_SIZE(list) - 1));
        progress = &top->progress;
        scope = top->scope();
        if (!progress->info) {
            ScopeInfo* info = info_of(scope);
            if (info == nullptr) return nullptr;
            progress->info = Shared<ScopeInfo>(info);
        }
        if (!progress->begun) {
            progress->begin();
            bool quiet = false;  // Of no interest for the ops that do not look as far.
            if (progress->frame && !hash_site(amanda_frame_of(progress->frame.get()), nullptr, false,
                                              &progress->around, &quiet)) {
                return nullptr;
            }
        }
    }
    bool inside = progress != nullptr && progress->info->inside;
    const void* bound = progress != nullptr ? progress->bound : nullptr;
    // Mixed and not only added, because the next number, the offset of the call, is also small.
    uint64_t hash = mix(uint64_t(type.number) + 1, 0);
    AmandaFrame* innermost = amanda_innermost_frame(thread->state);
    if (!hash_site(innermost, bound, inside, &hash, look_away) || *look_away) return nullptr;
    // Outside of any module it may be that of a zone.
    uint64_t place = progress != nullptr ? uint64_t(progress->info->number) : 0;
    uint64_t site = mix(hash, place);
    Owned* known_site = regional_.size() != 0 ? regional_.find(site) : nullptr;
    Owned regional = known_site != nullptr ? *known_site : Owned();
    PyObject* regions = regional.get();
    if (!hash_operands(operands, inside, regions, &hash)) return nullptr;

    bool follows = progress != nullptr && progress->is_followed();
    if (follows && progress->in_step) {
        Sequence* expected = progress->expected.get();
        if (progress->position < progress->size && progress->steps[progress->position].hash == hash) {
            *step = &progress->steps[progress->position++];
            Py_ssize_t position = 0;
            // Addresses do not tell which regions a site reads.
            bool plain = regions == nullptr && operands.each([&](PyObject* value) {
                return is_plain(value, position++, inside);
            });
            (*step)->fingerprint =
                plain ? amanda::fingerprint(*this, thread, *progress, type, operands) : 0;
            return (*step)->entry.get();
        }
        // The path differs from that of the last time. From here on occurrences are counted.
        Shared<Sequence> passed(new Sequence);
        for (size_t i = 0; i < progress->position; ++i) {
            passed->steps.push_back(expected->steps[i]);
            if (inside) ++progress->counts.at(expected->steps[i].hash);
        }
        progress->expected = passed;
        progress->in_step = false;
    }
    uint64_t key = mix(hash, place);
    uint32_t occurrence = 0;
    if (inside) {
        occurrence = std::min(progress->counts.at(hash)++, uint32_t(AMANDA_OCCURRENCES));
        key = mix(key, occurrence + 1);
    }
    Shared<Entry>* known = entries_.find(key);
    Entry* entry = known != nullptr ? known->get()
                                    : resolve_new(thread, type, operands, scope, bound, inside,
                                                  hash, key, occurrence, site);
    if (entry == nullptr) {
        if (inside) --progress->counts.at(hash);
        if (regions == nullptr && !PyErr_Occurred() && regional_.find(site) != nullptr) {
            return locate(thread, type, operands, look_away, step);
        }
        *look_away = !PyErr_Occurred();
        return nullptr;
    }
    if (!follows || (!inside && entry == passing_.get())) return entry;
    if (progress->expected && progress->expected->steps.size() < LONGEST) {
        Step passed;
        passed.hash = hash;
        passed.entry = Shared<Entry>(entry);
        progress->expected->steps.push_back(std::move(passed));
    } else {
        progress->expected = Shared<Sequence>();
    }
    return entry;
}

Entry* Identity::resolve_new(Thread* thread, const OpType& type, const Operands& operands,
                             PyObject* scope, const void* bound, bool inside, uint64_t hash,
                             uint64_t key, uint32_t occurrence, uint64_t site) {
    bool zoned;
    Owned frames = frames_of(thread, bound, inside, &zoned);
    if (!frames) return nullptr;
    Py_ssize_t shift = operands.first != nullptr;
    Owned args(PyTuple_New(operands.count + shift));
    if (!args) return nullptr;
    if (shift) PyTuple_SET_ITEM(args.get(), 0, Py_NewRef(operands.first));
    for (Py_ssize_t i = 0; i < operands.count; ++i) {
        PyTuple_SET_ITEM(args.get(), i + shift, Py_NewRef(operands.items[i]));
    }
    Owned kwargs(operands.keywords());
    Owned number(PyLong_FromUnsignedLong(occurrence));
    Owned zone(PyUnicode_FromString(zoned ? "" : "model"));
    Owned caller = users_frame(thread);
    // Only Python finds parts of weights.
    Owned weights(regional_.find(site) == nullptr ? PyList_New(0) : Py_NewRef(Py_None));
    if (!kwargs || !number || !zone || !caller || !weights) return nullptr;
    uint64_t again = 0;
    if (weights.get() != Py_None &&
        !hash_operands(operands, inside, nullptr, &again, weights.get())) {
        return nullptr;
    }
    bool plain = !in_stand_ins() && are_ordinary(operands);
    Owned record(PyObject_CallFunctionObjArgs(
        way_of(resolve.get()), type.name, scope, frames.get(), zone.get(), caller.get(),
        plain ? Py_True : Py_False, args.get(), kwargs.get(), number.get(), weights.get(), nullptr));
    if (!record || record.get() == Py_None) return nullptr;
    if (PyLong_Check(record.get())) {
        regional_.at(site) = std::move(record);
        return nullptr;
    }
    uint64_t dead = deaths - deaths_;
    if (entries_.size() > 16 * MANY || (dead > FEW && dead > entries_.size() / 2)) forget();
    Shared<Entry> entry(new Entry);
    entry->hash = hash;
    if (PyTuple_Check(record.get())) {
        entry->record = Owned::share(PyTuple_GET_ITEM(record.get(), 0));
        passing_ = entry;
        return entry.get();
    }
    entry->record = std::move(record);
    entries_.at(key) = entry;
    return entry.get();  // The table owns it.
}

ScopeInfo* Identity::info_of(PyObject* scope) {
    long number = number_of(scope, "number");
    if (number < 0 && PyErr_Occurred()) return nullptr;
    Shared<ScopeInfo>& info = scopes_.at(uint64_t(number));
    if (!info) {
        info = Shared<ScopeInfo>(new ScopeInfo);
        info->number = number;
        info->inside = is_true(scope, "root");
        info->scope = Owned::share(scope);
    }
    return info.get();
}

void Identity::forget() {
    // Activations hold references to what they need.
    scopes_.each([](Shared<ScopeInfo>& info) {
        info->expect(Shared<Sequence>());
        info->children.clear();
        info->order.clear();
    });
    scopes_.clear();
    roots.clear();
    entries_.clear();
    tokens_.clear();
    deaths_ = deaths;
    ++generation;
}

bool Identity::set_aside(PyObject* list) {
    passing_ = Shared<Entry>();
    // Nothing refers to tensors while no tools are applied, so others may get their addresses.
    tokens_.clear();
    ++generation;
    // What is expected next holds entries, and is found again by their hashes.
    scopes_.each([](Shared<ScopeInfo>& info) {
        info->expect(Shared<Sequence>());
        info->suspended = true;
    });
    // Activations of calls that go on keep the entries that they have.
    entries_.each([](Shared<Entry>& entry) {
        Shared<Entry> own(new Entry);
        own->hash = entry->hash;
        own->record = entry->record;
        entry = own;
    });
    bool moved = true;
    each_reference([&](Owned& reference) {
        Owned taken(reference.release());
        PyObject* item = taken ? taken.get() : Py_None;
        moved = moved && PyList_Append(list, item) == 0;
    });
    return moved;
}

bool Identity::take_back(PyObject* list) {
    scopes_.each([](Shared<ScopeInfo>& info) { info->suspended = false; });
    Py_ssize_t next = 0;
    each_reference([&](Owned& reference) {
        PyObject* item = next < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, next) : Py_None;
        ++next;
        if (item != Py_None) reference = Owned::share(item);
    });
    bool complete = next == PyList_GET_SIZE(list);
    each_reference([&](Owned& reference) { complete = complete && bool(reference); });
    return complete;
}

int add_identity(PyObject* module) {
    requires_grad = PyUnicode_InternFromString("requires_grad");
    is_leaf = PyUnicode_InternFromString("is_leaf");
    base_name = PyUnicode_InternFromString(kBase);
    parameter_mark = PyUnicode_InternFromString(kParameterMark);
    if (died == nullptr) died = PyCFunction_New(&parameter_died_definition, nullptr);
    if (died == nullptr || base_name == nullptr || parameter_mark == nullptr) return -1;
    return PyModule_AddObjectRef(module, "parameter_died", died);
}

}  // namespace amanda
