// Records a row for every value that an operator reads or writes, without calls of Python.
//
// It follows `amanda_tools.fingerprint.tool`, which does the same for all frameworks. Python is
// asked for what is not a dense tensor of torch's own class in main memory, and for the number of a
// type that is new.
//
// It is one long file because one call runs all of it.
#include "recording/recorder.h"

#include <structmember.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "owned.h"
#include "recording/rows.h"
#include "recording/visits.h"
#include "recording/xxh3.h"
#include "steps.h"
#include "table.h"
#include "torch_symbols.h"

namespace amanda {

namespace {

// Further positions, and further items, share a number.
constexpr size_t LAST_POSITION = 0xFFFF, LAST_ITEM = NO_ITEM - 1;
// Bytes of pending rows after which they are written.
constexpr Py_ssize_t ENOUGH = 1 << 16;
// Bytes of a tensor from which the GIL is released while it is read.
constexpr size_t LARGE = 1 << 18;

// What is known of a tensor that an operator wrote or read.
struct Made {
    int64_t version = -1;
    // read: the stretch of operators in which its elements were read last.
    uint32_t step = 0, read = 0, producer = NOBODY;
    uint64_t digest = 0;
    Norms norms;
    int32_t normed = -1;  // the dtype that the norms are of; -1 if they are not known
    uint32_t visit = 0;   // the visit that wrote it
    bool unwritten = false;
};
struct Known {
    Owned tensor;  // a weak reference
    Made made;
};

struct Execution {
    uint64_t thread;
    uint32_t number;
    bool reads_unwritten;
};

struct Operator {
    uint32_t number, part;
    bool is_empty, rearranges, overwrites, is_loading;
    uint64_t digest;
    Group group;
    uint32_t entered = 0;
    std::vector<Execution> running;
};

// The type of a value, compared with that of the last execution before it is looked up.
struct Kind {
    std::vector<int64_t> parts;  // dtype and sizes
    uint32_t number = 0;
    uint64_t digest = 0;  // with visits

    bool is(const Memory& memory) const {
        if (parts.size() != size_t(memory.dimensions) + 1 || parts[0] != memory.dtype) return false;
        for (int64_t i = 0; i < memory.dimensions; ++i) {
            if (parts[size_t(i) + 1] != memory.sizes[i]) return false;
        }
        return true;
    }
};

// Functions of Python; `recorder_new` reads them by these names.
#define AMANDA_RECORDER_FUNCTIONS(FIELD) \
    FIELD(flush)                         \
    FIELD(number_of_type)                \
    FIELD(digest_of_type)                \
    FIELD(digest)                        \
    FIELD(version)                       \
    FIELD(norms)                         \
    FIELD(thread)                        \
    FIELD(record_states)                 \
    FIELD(kept)

struct Recorder {
    PyObject_HEAD
    PyObject* weak_references;
#define AMANDA_DECLARE(name) PyObject* name;
    AMANDA_RECORDER_FUNCTIONS(AMANDA_DECLARE)
    PyObject *pending, *ref_type, *arguments;
    PyTypeObject *tensor_type, *parameter_type;
    long long order;
    unsigned int step, check, part, stretch, stretch_step;
    unsigned int began;  // the order of the first row of this step
    unsigned long long small;
    char takes, due, with_norms, has_kept, joins;
    unsigned long long spent, first, last;
    uint64_t checks;
    Py_ssize_t place;  // of torch's own object in that of Python
    size_t sweep;
    Table<Known>* known;
    Table<uint32_t>* threads;
    std::map<std::vector<int64_t>, Kind>* kinds;
    Visits* visits;
    std::vector<uint8_t>* scratch;
    std::vector<Row>* spare;  // memory for the rows of the next call
};

struct Note {
    PyObject_HEAD
    vectorcallfunc call;
    Recorder* recorder;
    std::shared_ptr<Operator> op;
    What what;
    std::vector<Kind> kinds;  // by position
};

PyTypeObject* recorder_type = nullptr;

uint64_t now() {
    return uint64_t(std::chrono::steady_clock::now().time_since_epoch() /
                    std::chrono::nanoseconds(1));
}

// An unsigned number that a function of Python returned; -1 for None, -2 with an exception.
int64_t number_of(const Owned& answer, uint64_t* number) {
    if (!answer) return -2;
    if (answer.get() == Py_None) return -1;
    *number = PyLong_AsUnsignedLongLongMask(answer.get());
    return PyErr_Occurred() ? -2 : 0;
}

// Appends rows together: another thread may have run meanwhile.
bool append(PyObject* pending, const std::vector<Row>& rows) {
    if (rows.empty()) return true;
    Py_ssize_t size = PyByteArray_GET_SIZE(pending), more = Py_ssize_t(rows.size() * sizeof(Row));
    if (PyByteArray_Resize(pending, size + more) < 0) return false;
    std::memcpy(PyByteArray_AS_STRING(pending) + size, rows.data(), size_t(more));
    return true;
}

// Releases the GIL while a large tensor is read.
class Unlocked {
  public:
    explicit Unlocked(const Memory& memory)
        : state_(bytes_of(memory) >= LARGE ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state_ != nullptr) PyEval_RestoreThread(state_);
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_;
};

// The elements of a tensor in C order, which are copied once where they are not.
class Elements {
  public:
    // While the GIL is released, other threads may use the recorder's memory.
    Elements(const Memory& memory, std::vector<uint8_t>* shared)
        : memory_(memory), scratch_(bytes_of(memory) < LARGE ? *shared : own_) {}

    const uint8_t* in_order() {
        if (found_ == nullptr) found_ = amanda::in_order(memory_, scratch_);
        return found_;
    }

  private:
    const Memory& memory_;
    std::vector<uint8_t> own_, &scratch_;
    const uint8_t* found_ = nullptr;
};

// One call of a routine.
class Call {
  public:
    Call(Recorder* recorder, Note* note) : recorder_(recorder), note_(note), op_(*note->op) {}

    bool run(PyObject* const* values, size_t count) {
        uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
        if (note_->what == INPUT) {
            enter(thread);
        } else {
            leave(thread);
        }
        if (!recorder_->takes) return true;
        uint64_t begin = now();
        if (recorder_->due && note_->what == INPUT) {
            Owned done(PyObject_CallNoArgs(recorder_->record_states));
            if (!done) return false;
        }
        if (recorder_->joins && op_.is_loading) return true;
        rows_.swap(*recorder_->spare);
        order_ = uint32_t(++recorder_->order);
        step_ = recorder_->step;
        if (op_.part != recorder_->part || step_ != recorder_->stretch_step) {
            recorder_->part = op_.part;
            recorder_->stretch_step = step_;
            ++recorder_->stretch;
        }
        stretch_ = recorder_->stretch;
        if (!find_thread(thread)) return false;
        if (recorder_->joins && note_->what == OUTPUT) {
            Row place = row(OUTPUT, 0, NO_ITEM);
            recorder_->visits->add_execution(op_.group, place, op_.digest, &rows_);
            visit_ = recorder_->visits->enter(op_.group, place, &rows_);
        }
        for (size_t i = 0; i < count; ++i) {
            if (!add(values[i], uint16_t(std::min(i, LAST_POSITION)))) return false;
        }
        if (rows_.empty() && !recorder_->joins) rows_.push_back(row(NONE, note_->what, NO_ITEM));
        if (note_->what == INPUT && reads_unwritten_) {
            for (Execution& one : op_.running) one.reads_unwritten |= one.thread == thread;
        }
        if (!append(recorder_->pending, rows_)) return false;
        if (PyByteArray_GET_SIZE(recorder_->pending) >= ENOUGH &&
            !Owned(PyObject_CallNoArgs(recorder_->flush))) {
            return false;
        }
        rows_.clear();
        rows_.swap(*recorder_->spare);
        uint64_t end = now();
        if (recorder_->first == 0) recorder_->first = begin;
        recorder_->last = end;
        recorder_->spent += end - begin;
        return true;
    }

  private:
    void enter(uint64_t thread) {
        number_ = op_.entered++;
        for (Execution& one : op_.running) {
            if (one.thread == thread) {
                one = {thread, number_, false};
                return;
            }
        }
        op_.running.push_back({thread, number_, false});
    }

    // Workers of torch may begin a backward operator in one thread and end it in another.
    void leave(uint64_t thread) {
        number_ = op_.entered - 1;
        if (op_.running.empty()) return;
        size_t at = op_.running.size() - 1;
        for (size_t i = 0; i < op_.running.size(); ++i) {
            if (op_.running[i].thread == thread) at = i;
        }
        number_ = op_.running[at].number;
        reads_unwritten_ = op_.running[at].reads_unwritten;
        op_.running.erase(op_.running.begin() + std::ptrdiff_t(at));
    }

    bool find_thread(uint64_t thread) {
        uint32_t* found = recorder_->threads->find(thread);
        if (found == nullptr) {
            uint64_t number = 0;
            if (number_of(Owned(PyObject_CallNoArgs(recorder_->thread)), &number) < 0) return false;
            recorder_->threads->at(thread) = uint32_t(number);
            thread_ = uint16_t(number);
        } else {
            thread_ = uint16_t(*found);
        }
        return true;
    }

    Row row(uint8_t what, uint16_t position, uint16_t item) const {
        return {order_, op_.number, step_, number_, NOBODY, 0, position, item,
                what,   0,          thread_, 0, 0, 0};
    }

    bool is_plain(PyObject* value) const {
        return Py_IS_TYPE(value, recorder_->tensor_type) ||
               Py_IS_TYPE(value, recorder_->parameter_type);
    }

    bool is_tensor(PyObject* value) const {
        return is_plain(value) || PyType_IsSubtype(Py_TYPE(value), recorder_->tensor_type);
    }

    bool add(PyObject* value, uint16_t position) {
        if (is_tensor(value)) return add_tensor(value, position, NO_ITEM);
        if (!PyList_Check(value) && !PyTuple_Check(value)) return true;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
            Owned item = Owned::share(PySequence_Fast_GET_ITEM(value, i));
            auto place = uint16_t(std::min(size_t(i), LAST_ITEM));
            if (is_tensor(item.get()) && !add_tensor(item.get(), position, place)) return false;
        }
        return true;
    }

    bool add_tensor(PyObject* tensor, uint16_t position, uint16_t item) {
        if (tensor == last_ && note_->what == OUTPUT) {
            // A gradient that goes to several inputs.
            last_row_.position = position;
            last_row_.item = item;
            emit();
            return true;
        }
        last_ = tensor;
        Memory memory;
        if (is_plain(tensor)) {
            memory = memory_of(*reinterpret_cast<void**>(reinterpret_cast<char*>(tensor) +
                                                         recorder_->place));
        }
        int64_t version = memory.version;
        if (memory.data == nullptr && !ask_version(tensor, &version)) return false;
        Made made;
        bool is_known = false;
        uint8_t flags = 0;
        if (note_->what == INPUT) {
            if (!look_up(tensor, &made, &is_known)) return false;
            if (is_known && made.step < step_) flags |= KEPT;
            if (is_known && (version < 0 || version != made.version)) {
                // A view was written, which may be a part.
                if (made.unwritten) flags |= UNWRITTEN;
                is_known = false;
            }
        }
        if (recorder_->joins && note_->what == INPUT) {
            Row place = row(INPUT, position, item);
            visit_ = recorder_->visits->enter(op_.group, place, &rows_);
            bool has_values = !made.unwritten || (position == 0 && op_.overwrites);
            bool is_inside = recorder_->visits->of_steps
                                 ? made.producer != NOBODY && made.producer >= recorder_->began
                                 : made.visit == visit_;
            if (is_known && is_inside && has_values) return true;
        }
        Row own = row(note_->what, position, item);
        Elements elements(memory, recorder_->scratch);
        bool has_digest = true;
        if (is_known && made.read == stretch_ && !is_small(memory) &&
            ++recorder_->checks % recorder_->check != 0) {
            own.digest = made.digest;
            flags |= REUSED;
        } else {
            if (!read(tensor, memory, elements, &own.digest, &has_digest)) return false;
            if (own.digest != made.digest) made.normed = -1;
        }
        if (is_known && has_digest) {
            own.producer = made.producer;
            if (made.unwritten) flags |= UNWRITTEN;
            if (own.digest != made.digest) flags |= UNSEEN_WRITER;
        }
        if (!has_digest) flags |= UNREADABLE;
        if (note_->what == INPUT) {
            if (position == 0 && op_.overwrites) {
                flags |= UNWRITTEN;
            } else if (flags & UNWRITTEN) {
                reads_unwritten_ = true;
            }
        } else if (op_.is_empty || (op_.rearranges && reads_unwritten_)) {
            flags |= UNWRITTEN;
        }
        if (recorder_->with_norms && has_digest && !(flags & UNWRITTEN)) {
            if (!find_norms(tensor, memory, elements, &made)) return false;
            own.norm = made.norms.norm;
            own.largest = made.norms.largest;
            if (made.norms.constant) flags |= CONSTANT;
        }
        if (has_digest) {
            bool is_new = note_->what == OUTPUT || !is_known || own.digest != made.digest;
            if (is_new) {
                made.version = version;
                made.step = step_;
                made.digest = own.digest;
                made.producer = note_->what == OUTPUT ? order_ : own.producer;
                made.visit = note_->what == OUTPUT ? visit_ : is_known ? made.visit : 0;
                made.unwritten = flags & UNWRITTEN;
            }
            made.read = stretch_;
            if (is_new ? !keep(tensor, made) : !(flags & REUSED)) {
                if (is_new) return false;
                if (Known* known = find(tensor)) known->made.read = stretch_;
            }
        }
        own.flags = flags;
        if (!add_kind(tensor, memory, position, &own.type, &last_type_)) return false;
        last_row_ = own;
        emit();
        return true;
    }

    // Adds the last row, or its value to the visit.
    void emit() {
        if (recorder_->joins) {
            recorder_->visits->add(op_.group, last_row_, op_.digest, last_type_, &rows_);
        } else {
            rows_.push_back(last_row_);
        }
    }

    // Returns true for a tensor that is always read again. Python reads those without memory here.
    bool is_small(const Memory& memory) const {
        return memory.data != nullptr && bytes_of(memory) < recorder_->small;
    }

    bool ask_version(PyObject* tensor, int64_t* version) {
        uint64_t number = 0;
        int64_t state = number_of(Owned(PyObject_CallOneArg(recorder_->version, tensor)), &number);
        *version = state == 0 ? int64_t(number) : -1;
        return state != -2;
    }

    Known* find(PyObject* tensor) {
        Known* known = recorder_->known->find(key_of(tensor));
        return known != nullptr && leads_to(known->tensor, tensor) ? known : nullptr;
    }

    // Finds what is known of a tensor, now or from an earlier session.
    bool look_up(PyObject* tensor, Made* made, bool* is_known) {
        if (Known* known = find(tensor)) {
            *made = known->made;
            *is_known = true;
        } else if (recorder_->has_kept) {
            Owned answer(PyObject_CallOneArg(recorder_->kept, tensor));
            if (!answer) return false;
            if (answer.get() == Py_None) return true;
            unsigned long long digest;
            int unwritten, constant;
            if (!PyArg_ParseTuple(answer.get(), "LIIKIpiffpI", &made->version, &made->step,
                                  &made->read, &digest, &made->producer, &unwritten, &made->normed,
                                  &made->norms.norm, &made->norms.largest, &constant,
                                  &made->visit)) {
                return false;
            }
            made->digest = digest;
            made->unwritten = unwritten != 0;
            made->norms.constant = constant != 0;
            *is_known = true;
            return keep(tensor, *made);
        }
        return true;
    }

    bool keep(PyObject* tensor, const Made& made) {
        if (Known* known = find(tensor)) {
            known->made = made;
            return true;
        }
        Owned weak(new_reference(tensor));
        if (!weak) return false;
        if (recorder_->known->size() >= recorder_->sweep) sweep();
        Known& known = recorder_->known->at(key_of(tensor));
        known.tensor = std::move(weak);
        known.made = made;
        return true;
    }

    // Does what a call of the type does, which would make a tuple each time. Another thread may run
    // meanwhile, and makes one of its own.
    PyObject* new_reference(PyObject* tensor) {
        Owned arguments(std::exchange(recorder_->arguments, nullptr));
        if (!arguments) arguments = Owned(PyTuple_New(1));
        if (!arguments) return nullptr;
        PyTuple_SET_ITEM(arguments.get(), 0, Py_NewRef(tensor));
        auto* type = reinterpret_cast<PyTypeObject*>(recorder_->ref_type);
        PyObject* made = type->tp_new(type, arguments.get(), nullptr);
        PyTuple_SET_ITEM(arguments.get(), 0, nullptr);
        Py_DECREF(tensor);
        if (recorder_->arguments == nullptr) recorder_->arguments = arguments.release();
        return made;
    }

    // Forgets the tensors that have died.
    COLD void sweep() {
        Table<Known> alive;
        recorder_->known->each([&](Known& one) {
            PyObject* tensor = PyWeakref_GET_OBJECT(one.tensor.get());
            if (tensor != Py_None) alive.at(key_of(tensor)) = std::move(one);
        });
        *recorder_->known = std::move(alive);
        recorder_->sweep = 2 * recorder_->known->size() + 1024;
    }

    bool read(PyObject* tensor, const Memory& memory, Elements& elements, uint64_t* digest,
              bool* has_digest) {
        if (memory.data == nullptr) {
            Owned answer(PyObject_CallOneArg(recorder_->digest, tensor));
            int64_t state = number_of(answer, digest);
            *has_digest = state == 0;
            return state != -2;
        }
        Unlocked unlocked(memory);
        *digest = xxh3(elements.in_order(), bytes_of(memory));
        return true;
    }

    bool find_norms(PyObject* tensor, const Memory& memory, Elements& elements, Made* made) {
        if (memory.data != nullptr) {
            if (made->normed == memory.dtype) return true;
            made->normed = memory.dtype;
            made->norms = Norms();
            Unlocked unlocked(memory);
            if (norms_of(memory, elements.in_order(), &made->norms)) return true;
        }
        Owned answer(PyObject_CallOneArg(recorder_->norms, tensor));
        int constant = 0;
        Norms& norms = made->norms;
        if (!answer ||
            !PyArg_ParseTuple(answer.get(), "ffp", &norms.norm, &norms.largest, &constant)) {
            return false;
        }
        norms.constant = constant != 0;
        return true;
    }

    bool add_kind(PyObject* tensor, const Memory& memory, size_t position, uint32_t* number,
                  uint64_t* digest) {
        Kind asked;
        Kind* kind = &asked;
        if (memory.data == nullptr) {
            if (!ask_kind(tensor, kind)) return false;
        } else {
            if (note_->kinds.size() <= position) note_->kinds.resize(position + 1);
            kind = &note_->kinds[position];
            if (!kind->is(memory)) {
                std::vector<int64_t> parts(memory.sizes, memory.sizes + memory.dimensions);
                parts.insert(parts.begin(), memory.dtype);
                auto found = recorder_->kinds->find(parts);
                if (found == recorder_->kinds->end()) {
                    if (!ask_kind(tensor, &asked)) return false;
                    asked.parts = std::move(parts);
                    found = recorder_->kinds->emplace(asked.parts, asked).first;
                }
                note_->kinds[position] = found->second;  // Python may have run meanwhile.
                kind = &note_->kinds[position];
            }
        }
        *number = kind->number;
        *digest = kind->digest;
        return true;
    }

    bool ask_kind(PyObject* tensor, Kind* kind) {
        uint64_t found = 0;
        Owned answer(PyObject_CallOneArg(recorder_->number_of_type, tensor));
        if (number_of(answer, &found) < 0) return false;
        kind->number = uint32_t(found);
        if (!recorder_->joins) return true;
        Owned digest(PyObject_CallOneArg(recorder_->digest_of_type, answer.get()));
        return number_of(digest, &kind->digest) == 0;
    }

    Recorder* recorder_;
    Note* note_;
    Operator& op_;
    std::vector<Row> rows_;
    uint32_t order_ = 0, step_ = 0, stretch_ = 0, number_ = 0, visit_ = 0;
    PyObject* last_ = nullptr;  // the tensor of the last row
    Row last_row_ = {};
    uint64_t last_type_ = 0;
    uint16_t thread_ = 0;
    bool reads_unwritten_ = false;
};

PyObject* note_call(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
    if (names != nullptr && PyTuple_GET_SIZE(names) != 0) {
        PyErr_SetString(PyExc_TypeError, "a note takes no keyword arguments");
        return nullptr;
    }
    auto* note = reinterpret_cast<Note*>(self);
    Owned kept = Owned::share(self);
    bool done = Call(note->recorder, note).run(values, size_t(PyVectorcall_NARGS(flags)));
    return done ? Py_NewRef(Py_None) : nullptr;
}

int note_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(reinterpret_cast<PyObject*>(reinterpret_cast<Note*>(self)->recorder));
    return 0;
}

void note_dealloc(PyObject* self) {
    auto* note = reinterpret_cast<Note*>(self);
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    note->op.~shared_ptr();
    note->kinds.~vector();
    Py_DECREF(reinterpret_cast<PyObject*>(note->recorder));
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* make_note(Recorder* recorder, const std::shared_ptr<Operator>& op, What what) {
    PyObject* self = note_type->tp_alloc(note_type, 0);
    if (self == nullptr) return nullptr;
    auto* note = reinterpret_cast<Note*>(self);
    note->call = note_call;
    note->recorder = recorder;
    Py_INCREF(reinterpret_cast<PyObject*>(recorder));
    new (&note->op) std::shared_ptr<Operator>(op);
    new (&note->kinds) std::vector<Kind>();
    note->what = what;
    return self;
}

// (number, part, is_empty, rearranges, overwrites), and where visits are recorded (digest,
// group, digest of the group, is_loading): the routines before and after an operator.
PyObject* recorder_notes(PyObject* self, PyObject* args) {
    unsigned int number, part, group = 0;
    unsigned long long digest = 0, group_digest = 0;
    int is_empty, rearranges, overwrites, is_loading = 0;
    if (!PyArg_ParseTuple(args, "IIppp|KIKp", &number, &part, &is_empty, &rearranges, &overwrites,
                          &digest, &group, &group_digest, &is_loading)) {
        return nullptr;
    }
    auto op = std::make_shared<Operator>();
    op->number = number;
    op->part = part;
    op->is_empty = is_empty != 0;
    op->rearranges = rearranges != 0;
    op->overwrites = overwrites != 0;
    op->is_loading = is_loading != 0;
    op->digest = digest;
    op->group = {group, group_digest};
    auto* recorder = reinterpret_cast<Recorder*>(self);
    Owned before(make_note(recorder, op, INPUT)), after(make_note(recorder, op, OUTPUT));
    return before && after ? PyTuple_Pack(2, before.get(), after.get()) : nullptr;
}

PyObject* recorder_next(PyObject* self, PyObject*) {
    return PyLong_FromLongLong(++reinterpret_cast<Recorder*>(self)->order);
}

// (of_steps): from now on, values are joined.
PyObject* recorder_join(PyObject* self, PyObject* of_steps) {
    auto* recorder = reinterpret_cast<Recorder*>(self);
    int truth = PyObject_IsTrue(of_steps);
    if (truth < 0) return nullptr;
    recorder->joins = 1;
    recorder->visits->of_steps = truth != 0;
    Py_RETURN_NONE;
}

// (end): adds rows of the visits in progress.
PyObject* recorder_close(PyObject* self, PyObject* end) {
    auto* recorder = reinterpret_cast<Recorder*>(self);
    int ends = PyObject_IsTrue(end);
    if (ends < 0) return nullptr;
    std::vector<Row> rows;
    recorder->visits->close(recorder->step, ends != 0, &rows);
    if (!append(recorder->pending, rows)) return nullptr;
    if (ends) recorder->began = uint32_t(recorder->order + 1);
    const Visits::Sum& sum = recorder->visits->closed;
    if (sum.order == NOBODY) Py_RETURN_NONE;
    return Py_BuildValue("IKB", sum.order, (unsigned long long)sum.digest, sum.left_out);
}

// Forgets all tensors, and returns what was known of those that are alive.
PyObject* recorder_take(PyObject* self, PyObject*) {
    auto* recorder = reinterpret_cast<Recorder*>(self);
    ++recorder->stretch;
    Table<Known> taken;
    std::swap(taken, *recorder->known);
    Owned list(PyList_New(0));
    taken.each([&](Known& one) {
        PyObject* tensor = PyWeakref_GET_OBJECT(one.tensor.get());
        if (!list || tensor == Py_None) return;
        const Made& made = one.made;
        Owned entry(Py_BuildValue("O(LIIKIiiffiI)", tensor, (long long)made.version, made.step,
                                  made.read, (unsigned long long)made.digest, made.producer,
                                  made.unwritten, made.normed, double(made.norms.norm),
                                  double(made.norms.largest), made.norms.constant,
                                  made.visit));
        if (!entry || PyList_Append(list.get(), entry.get()) < 0) list = Owned();
    });
    return list.release();
}

bool read_function(PyObject* owner, const char* name, PyObject** place) {
    *place = PyObject_GetAttrString(owner, name);
    return *place != nullptr;
}

// Finds where Python's object has the address of torch's.
bool find_place(Recorder* recorder, PyObject* example) {
    Owned address(PyObject_GetAttrString(example, kAddress));
    void* found = address ? PyLong_AsVoidPtr(address.get()) : nullptr;
    if (PyErr_Occurred()) return false;
    for (size_t at = sizeof(PyObject); at + sizeof(void*) <= size_t(Py_TYPE(example)->tp_basicsize);
         at += sizeof(void*)) {
        void** word = reinterpret_cast<void**>(reinterpret_cast<char*>(example) + at);
        if (*word == found && found != nullptr && memory_of(*word).data != nullptr) {
            recorder->place = Py_ssize_t(at);
            return true;
        }
    }
    PyErr_SetString(PyExc_RuntimeError, "the address of torch's tensor was not found");
    return false;
}

PyObject* recorder_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *owner, *pending, *example, *parameter, *ref_type;
    if (!PyArg_ParseTuple(args, "OO!OO!O!", &owner, &PyByteArray_Type, &pending, &example,
                          &PyType_Type, &parameter, &PyType_Type, &ref_type)) {
        return nullptr;
    }
    Owned made(type->tp_alloc(type, 0));
    if (!made) return nullptr;
    auto* self = reinterpret_cast<Recorder*>(made.get());
    self->known = new Table<Known>();
    self->threads = new Table<uint32_t>();
    self->kinds = new std::map<std::vector<int64_t>, Kind>();
    self->visits = new Visits();
    self->scratch = new std::vector<uint8_t>();
    self->spare = new std::vector<Row>();
    self->pending = Py_NewRef(pending);
    self->ref_type = Py_NewRef(ref_type);
    self->tensor_type = Py_TYPE(example);
    self->parameter_type = reinterpret_cast<PyTypeObject*>(parameter);
    Py_INCREF(self->tensor_type);
    Py_INCREF(self->parameter_type);
    self->order = -1;
    self->check = self->stretch = 1;
    self->sweep = 1024;
#define AMANDA_READ(name) \
    if (!read_function(owner, #name, &self->name)) return nullptr;
    AMANDA_RECORDER_FUNCTIONS(AMANDA_READ)
    return find_place(self, example) ? made.release() : nullptr;
}

int recorder_traverse(PyObject* given, visitproc visit, void* arg) {
    auto* self = reinterpret_cast<Recorder*>(given);
    Py_VISIT(Py_TYPE(given));
#define AMANDA_VISIT(name) Py_VISIT(self->name);
    AMANDA_RECORDER_FUNCTIONS(AMANDA_VISIT)
    return 0;
}

int recorder_clear(PyObject* given) {
    auto* self = reinterpret_cast<Recorder*>(given);
    self->takes = 0;  // It has no functions any more.
#define AMANDA_CLEAR(name) Py_CLEAR(self->name);
    AMANDA_RECORDER_FUNCTIONS(AMANDA_CLEAR)
    return 0;
}

void recorder_dealloc(PyObject* given) {
    auto* self = reinterpret_cast<Recorder*>(given);
    PyTypeObject* type = Py_TYPE(given);
    PyObject_GC_UnTrack(given);
    if (self->weak_references != nullptr) PyObject_ClearWeakRefs(given);
    recorder_clear(given);
    delete self->known;
    delete self->threads;
    delete self->kinds;
    delete self->visits;
    delete self->scratch;
    delete self->spare;
    Py_XDECREF(self->pending);
    Py_XDECREF(self->ref_type);
    Py_XDECREF(self->arguments);
    Py_XDECREF(reinterpret_cast<PyObject*>(self->tensor_type));
    Py_XDECREF(reinterpret_cast<PyObject*>(self->parameter_type));
    type->tp_free(given);
    Py_DECREF(type);
}

PyMemberDef recorder_members[] = {
    {"order", T_LONGLONG, offsetof(Recorder, order), 0, "Order of the last row."},
    {"step", T_UINT, offsetof(Recorder, step), 0, "Number of the step."},
    {"check", T_UINT, offsetof(Recorder, check), 0, "Of so many inputs, one is read again."},
    {"small", T_ULONGLONG, offsetof(Recorder, small), 0,
     "Inputs of fewer bytes are all read again."},
    {"takes", T_BOOL, offsetof(Recorder, takes), 0, "Whether this step is recorded."},
    {"due", T_BOOL, offsetof(Recorder, due), 0, "Whether states are recorded next."},
    {"with_norms", T_BOOL, offsetof(Recorder, with_norms), 0, "Whether norms are recorded."},
    {"has_kept", T_BOOL, offsetof(Recorder, has_kept), 0, "Whether `kept` is asked."},
    {"spent", T_ULONGLONG, offsetof(Recorder, spent), READONLY, "Time spent, in nanoseconds."},
    {"first", T_ULONGLONG, offsetof(Recorder, first), READONLY, "When the first call began."},
    {"last", T_ULONGLONG, offsetof(Recorder, last), READONLY, "When the last call ended."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Recorder, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef recorder_methods[] = {
    {"notes", recorder_notes, METH_VARARGS,
     "notes(number, part, is_empty, rearranges, overwrites, digest=0, group=0, group_digest=0, "
     "is_loading=False, /)\n--\n\n"
     "Return the routines before and after an operator."},
    {"next", recorder_next, METH_NOARGS, "next()\n--\n\nReturn the order of the next rows."},
    {"join", recorder_join, METH_O,
     "join(of_steps, /)\n--\n\nRecord visits of modules, or the sum of their digests."},
    {"close", recorder_close, METH_O,
     "close(end, /)\n--\n\nAdd rows of the visits in progress, and return the digest of the step."},
    {"take", recorder_take, METH_NOARGS,
     "take()\n--\n\nForget all tensors, and return those that are alive and what was known."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef note_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Note, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot recorder_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(recorder_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(recorder_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(recorder_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(recorder_clear)},
    {Py_tp_members, recorder_members},
    {Py_tp_methods, recorder_methods},
    {0, nullptr},
};
PyType_Spec recorder_spec = {"amanda_driver_torch._native.Recorder", sizeof(Recorder), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, recorder_slots};

PyType_Slot note_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(note_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(note_traverse)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, note_members},
    {0, nullptr},
};
PyType_Spec note_spec = {"amanda_driver_torch._native.Note", sizeof(Note), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                             Py_TPFLAGS_DISALLOW_INSTANTIATION,
                         note_slots};

PyObject* can_record(PyObject*, PyObject*) { return PyBool_FromLong(can_read_memory()); }

PyMethodDef functions[] = {
    {"can_record", can_record, METH_NOARGS,
     "can_record()\n--\n\nReturn whether all symbols were found that a recorder needs."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_recorder(PyObject* module) {
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    Py_XSETREF(recorder_type, reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&recorder_spec)));
    Py_XSETREF(note_type, reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&note_spec)));
    if (recorder_type == nullptr || note_type == nullptr) return -1;
    return PyModule_AddObjectRef(module, "Recorder", reinterpret_cast<PyObject*>(recorder_type));
}

}  // namespace amanda
