"""`Fingerprint`: record an exact digest of every value that the operators of a run read and write.

Decides what is recorded and when. `files` writes it, and `amanda_tools.diff` compares two runs.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ClassVar, Literal, get_args

from amanda_core import OpContext
from amanda_core.driver_kit.recording import Recorder
from amanda_core.engine.action import Routine
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.processes.launched import Process
from amanda_core.results.records import record_folder
from amanda_core.runtime.weak import Known, Witness, add_holder
from amanda_tools.fingerprint.files import (
    CONSTANT,
    HANDLE,
    INPUT,
    KEPT,
    LAST_ITEM,
    LAST_POSITION,
    NO_ITEM,
    NOBODY,
    NONE,
    OUTPUT,
    REUSED,
    STATE,
    UNREADABLE,
    UNSEEN_WRITER,
    UNWRITTEN,
    Stream,
    contiguous,
    digest_of,
)
from amanda_tools.fingerprint.operators import Execution, Op
from amanda_tools.fingerprint.result import FingerprintResult
from amanda_tools.fingerprint.visits import MODULE, STEP, Group, StepDigest, Visit
from amanda_tools.kit.operators.entries import EitherWayOp, leaf_of, passes_gradients_on
from amanda_tools.kit.operators.tool import OperatorTool
from amanda_tools.kit.tensors.values import facts_of, need_numpy, numbers

__all__ = ["Fingerprint", "Level", "norms_of"]

#: What has a digest: each value, what each module read and wrote, or each step.
Level = Literal["operators", "modules", "steps"]

#: Further threads share a number.
_MOST_THREADS = 0xFFFF
#: Inputs of fewer bytes are read again at each use, which takes no longer than to find them.
_SMALL = 8192
#: Dtypes of handles of variables and the like, which have no values of their own.
_HANDLES = frozenset({"resource", "variant"})


@dataclass(slots=True)
class _Made:
    """What is known of a tensor that an operator wrote or read."""

    version: int | None
    step: int
    #: The stretch of operators in which its elements were read last.
    read: int
    digest: int
    #: Order of the row of the operator that wrote it.
    producer: int
    unwritten: bool


class Fingerprint(OperatorTool[Op]):
    """Records a digest of every tensor that operators read and write, in the order of execution.

    The digest is exact: two tensors have the same one if their elements have the same bits in the
    same order, and otherwise different ones but for a chance of 2**-64. ``amanda diff`` compares
    the fingerprints of two runs and names the operator at which they part.

    Args:
        norms: Also record the 2-norm and the largest magnitude of floating-point tensors.
        steps: Numbers of the steps to record; the default is all.
        folder: Folder to write to while the program runs, so that the rows are there even if the
            process is killed. By default a temporary one, from which the result is written.
        everything: Record all operators; False leaves out those outside the model, such as those
            of an optimizer.
        backward: Record gradients as well.
        check: Of so many inputs of 8 KiB or more whose tensor version says that nothing has written
            them since their last digest was made, one is read again. 1 reads all, since not all
            writes are counted. All are read again where another part of a step begins, such as the
            optimizer, and after each collective.
        level: What has a digest. ``modules`` writes two rows for each visit of a module, and
            ``steps`` one for each step, which suffices to find the window that is worth recording
            again with ``operators``. Of gradients these record what operators write, and
            ``steps`` only what arrives at weights, where the framework says so.
        ranks: Numbers of the processes to record; the default is all.

    Raises:
        ValueError: An option has an invalid value, or the folder has a fingerprint already.
        ImportError: NumPy is not installed.

    >>> tool = Fingerprint(steps=[0, 1])
    """

    needs: ClassVar[tuple[str, ...]] = ("facts",)
    # It must see the values of the program, with all that other tools do to them.
    outermost: ClassVar[bool] = True
    changes_values = False
    _form: ClassVar[type[FingerprintResult]] = FingerprintResult
    #: Whether a driver's recorder may add the rows: a subclass adds no others.
    has_plain_rows: ClassVar[bool] = True

    def __init__(
        self,
        norms: bool = False,
        steps: list[int] | None = None,
        folder: Path | None = None,
        everything: bool = True,
        backward: bool = True,
        check: int = 16,
        level: Level = "operators",
        ranks: list[int] | None = None,
    ) -> None:
        super().__init__(everything)
        if check < 1:
            raise ValueError(f"check must be 1 or more, but is {check}")
        if level not in get_args(Level):
            raise ValueError(f"level must be of {', '.join(get_args(Level))}, not {level!r}")
        if norms and level != "operators":
            raise ValueError(f"norms are of single values: leave them out with level={level}")
        need_numpy()
        self.norms = norms
        self.steps = None if steps is None else frozenset(steps)
        if folder is None:
            folder = record_folder(self, "fingerprint")
        self._stream = Stream(Path(folder))
        weakref.finalize(self, self._stream.close)
        self.level: Level = level
        if level != "operators":
            self.needs = (*self.needs, "ordered")  # type: ignore[misc]
        chosen = {"level": level, "steps": _listed(steps), "ranks": _listed(ranks)}
        self._stream.say(**{name: value for name, value in chosen.items() if value})
        #: The visit in progress, by thread, and the number of earlier ones.
        self._visits: dict[int, Visit] = {}
        self._visited: dict[int, int] = {}
        #: The digest of the visits of this step that have ended, if steps have one.
        self._whole = StepDigest()
        #: How many digests earlier steps with this number had; None if it is not known yet.
        self._earlier: int | None = None
        #: A number in the order of execution at which this step began.
        self._began = 0
        self._types: dict[tuple[object, ...], int] = {}
        self._type_digests: list[int] = []
        self._local = threading.local()
        #: Number of threads so far.
        self._threads = 0
        self._known: Known[_Made] = Known()
        #: The drivers' facts, by namespace.
        self._facts: dict[str, Facts] = {}
        self._unreadable: dict[str, int] = {}
        self._order = -1
        #: What records in place of `enter` and `leave`, and its questions.
        self._recorder: Recorder | None = None
        self._keeper: _Keeper | None = None
        self._may_use_recorder = self.has_plain_rows
        #: Numbers of groups, by framework.
        self._group_numbers: dict[tuple[str, Group], int] = {}
        #: Number of operators so far.
        self._count = 0
        self.check = check
        self._checks = 0
        #: Numbers of the parts of a step, and the part and step of the present stretch.
        self._parts: dict[tuple[object, ...], int] = {}
        self._stretch, self._stretch_of = 0, (-1, -1)
        self._step, self._takes = 0, self.steps is None or 0 in self.steps
        #: Numbers of what is not an operator, by kind and name.
        self._others: dict[tuple[str, str], int] = {}
        #: How often what is not an operator has had a row, by its number and the step.
        self._seen: dict[tuple[int, int], int] = {}
        self._states_due = True
        #: The last state of Python's random generator, and its digest.
        self._python_state: tuple[object, int] = (None, 0)
        if not self._is_chosen(ranks):
            return
        self.add_inst_for_op(self.analyse)
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)
        self.add_inst_for_step(self.begin)

    def analyse(self, context: OpContext) -> None:
        """Insert routines that record the inputs and outputs of an operator."""
        if not self.is_wanted(context):
            return
        enter, leave, options = self._routines(self._op(context))
        context.insert_before_op(enter, observe=True, **options)
        context.insert_after_op(leave, observe=True, **options)

    def analyse_backward(self, context: OpContext) -> None:
        """Insert routines that record the gradients that a backward operator reads and writes."""
        joins = self.level != "operators"
        if not self.is_wanted(context):
            return
        if self.level == "steps" and passes_gradients_on(context):
            return  # A difference in them arrives at weights, or has no effect.
        enter, leave, options = self._routines(self._op(context))
        is_leaf = joins and leaf_of(context) is not None
        if is_leaf or not joins:
            # What others read has been recorded where it was written.
            context.insert_before_backward_op(enter, observe=True, **options)
        if not is_leaf:
            context.insert_after_backward_op(leave, observe=True, **options)

    def begin(self, step: int) -> None:
        """Record the number of the step, and whether it is recorded."""
        with self._lock:
            self._write_visits(end=True)
            self._step = step
            self._takes = self.steps is None or step in self.steps
            self._states_due = True
            if self._recorder is not None:
                self._recorder.step, self._recorder.takes = step, self._takes
                self._recorder.due = True
            # What is in the buffer is on the disk at the latest after each step.
            self._stream.flush()

    def enter(self, *inputs: Any, op: Op) -> None:
        """Record the inputs of one execution."""
        begin = perf_counter_ns()
        with self._lock:
            execution = op.enter()
            if self._takes:
                if self._states_due:
                    self._record_states()
                self._add_rows(inputs, op, INPUT, execution)
                self._clock.add(begin, perf_counter_ns())

    def leave(self, *outputs: Any, op: Op) -> None:
        """Record the outputs of one execution."""
        begin = perf_counter_ns()
        with self._lock:
            execution = op.leave()
            if self._takes:
                self._add_rows(outputs, op, OUTPUT, execution)
                self._clock.add(begin, perf_counter_ns())

    def result(self) -> FingerprintResult:
        """Return what has been recorded so far."""
        with self._lock:
            self._write_visits(end=False)
            notes = [*self._notes, *self.not_seen()]
            notes += [
                f"{count} tensors without a digest: {why}"
                for why, count in self._unreadable.items()
            ]
            self._stream.end(notes)
            clock = self._clock
            if self._recorder is not None:
                clock = clock.joined(self._recorder)
            return self._form.of(self._stream, notes, clock.spent / 1e9, clock.wall / 1e9, self)

    def _routines(self, op: Op) -> tuple[Routine, Routine, dict[str, Any]]:
        """Return the routines before and after an operator, and their keyword arguments.

        They are the driver's own if it has a recorder, of which there is one in a process.
        """
        if self._recorder is None and self._may_use_recorder and op.facts.recorder is not None:
            keeper = _Keeper(self, op.facts, self._lock)
            recorder = self._recorder = op.facts.recorder(keeper, self._stream.pending)
            self._may_use_recorder = recorder is not None
            if recorder is not None:
                self._keeper, keeper.recorder = keeper, weakref.ref(recorder)
                recorder.order, recorder.step, recorder.check = self._order, self._step, self.check
                recorder.takes, recorder.due = self._takes, self._states_due
                recorder.with_norms, recorder.small = self.norms, _SMALL
                if self.level != "operators":
                    recorder.join(self.level == "steps")
        if self._recorder is None or self._keeper is None or self._keeper.facts is not op.facts:
            return self.enter, self.leave, {"op": op}
        if op.notes is None:
            part = self._parts.setdefault(op.part, len(self._parts))
            of_visits: tuple[Any, ...] = ()
            if self.level != "operators":
                of_visits = op.digest, op.group_number, op.group.digest, op.is_loading
            op.notes = self._recorder.notes(
                op.number, part, op.is_empty, op.rearranges, op.overwrites, *of_visits
            )
        return *op.notes, {}

    def _op(self, context: OpContext) -> Op:
        facts = facts_of(context)
        if not context.supports("ordered"):
            self._notes.setdefault(
                f"on {context.namespace} routines run in any order: the first difference is the "
                "first that was recorded, not the first of the program"
            )
        self._facts.setdefault(context.namespace, facts)
        return self.account_of(context, lambda: self._new_op(context, facts))

    def _new_op(self, context: OpContext, facts: Facts) -> Op:
        described = EitherWayOp.of(context)
        names = [] if context.is_backward() else list(context.input_names)
        if self.level == "operators":
            self._stream.add_op(described, names, self._weights_of(context))
            self._count += 1
            return Op(context, described, facts, self._count - 1)
        op = Op(context, described, facts, 0)
        # Drivers number their visits themselves, so that each has groups of its own.
        key = context.namespace.split("/")[0], op.group
        number = self._group_numbers.get(key)
        if number is None:
            number = len(self._group_numbers)
            if self.level == "modules":
                number = self._add_other(MODULE, op.group.name, op.group)
            self._group_numbers[key] = number
        op.group_number = number
        return op

    def _weights_of(self, context: OpContext) -> list[tuple[int, int, str]] | None:
        """Return the position, item and name of each weight, for those who need them."""
        return None

    def _is_chosen(self, ranks: list[int] | None) -> bool:
        """Return True if this process is to be recorded; add a note if it is not, or not known."""
        if ranks is None:
            return True
        rank = Process.of_environment().rank
        if rank in ranks:
            return True
        if rank is None:
            self._notes["no launcher says the rank of this process, so that it was recorded"] = None
            return True
        self._notes[f"rank {rank} was not to be recorded"] = None
        return False

    def _visit(self, op: Op) -> Visit:
        """Return the visit to which an execution of an operator in this thread belongs."""
        thread = self._number_of_thread()
        visit = self._visits.get(thread)
        if visit is None or visit.op != op.group_number:
            if visit is not None:
                self._end_visit(visit)
            number = op.group_number
            execution = self._visited[number] = self._visited.get(number, -1) + 1
            visit = Visit(op.group, number, self._next(), execution, thread)
            self._visits[thread] = visit
        return visit

    def _end_visit(self, visit: Visit) -> None:
        if self.level == "steps":
            self._whole.add(visit)
        else:
            self._write_visit(visit.op, visit.order, visit.execution, visit.thread, visit)

    def _write_visits(self, end: bool) -> None:
        """Write what was recorded of the step so far; readers take the last row of a visit.

        Args:
            end: Whether the step ends.
        """
        if self.level == "operators":
            return
        ended = copy(self._whole)
        for visit in self._visits.values():
            self._end_visit(visit)
        whole, self._whole = self._whole, ended
        if self._recorder is not None and (found := self._recorder.close(end)) is not None:
            whole.join(*found)
        if whole.order is not None:
            number = self._named(STEP, "all values")
            if self._earlier is None:
                self._earlier = self._again(number)
            self._write_visit(number, whole.order, self._earlier, 0, whole)
        if end:
            self._visits.clear()
            self._whole, self._earlier, self._began = StepDigest(), None, self._next()

    def _write_visit(
        self, op: int, order: int, execution: int, thread: int, written: Visit | StepDigest
    ) -> None:
        for what, position, flags, digest in written.rows():
            norms = 0.0, 0.0
            self._aside(what, order, op, execution, digest, norms, position, NOBODY, flags, thread)

    def _next(self) -> int:
        if self._recorder is not None:
            return self._recorder.next()
        self._order += 1
        return self._order

    def _number_of_thread(self) -> int:
        # The system gives the number of a thread that has ended to another one.
        try:
            number: int = self._local.number
        except AttributeError:
            number = self._local.number = min(self._threads, _MOST_THREADS)
            self._threads += 1
        return number

    def _add_rows(self, values: Sequence[Any], op: Op, what: int, execution: Execution) -> None:
        recorded = self.level != "operators"
        if recorded and op.is_loading:
            return
        order = self._next()
        stretch = self._parts.setdefault(op.part, len(self._parts)), self._step
        if stretch != self._stretch_of:
            self._stretch, self._stretch_of = self._stretch + 1, stretch
        if recorded and what == OUTPUT:
            self._visit(op).add_execution(op.digest, order)
        for number, value in enumerate(values):
            position = min(number, LAST_POSITION)
            if op.facts.is_tensor(value):
                self._one(value, op, what, order, execution, position, NO_ITEM)
                recorded = True
            elif isinstance(value, (list, tuple)):
                for item, inner in enumerate(value):
                    if op.facts.is_tensor(inner):
                        place = min(item, LAST_ITEM)
                        self._one(inner, op, what, order, execution, position, place)
                        recorded = True
        if not recorded:
            self._aside(NONE, order, op.number, execution.number, position=what)

    def _aside(
        self,
        what: int,
        order: int,
        op: int,
        execution: int,
        digest: int = 0,
        norms: tuple[float, float] = (0.0, 0.0),
        position: int = 0,
        type_: int = 0,
        flags: int = 0,
        thread: int | None = None,
    ) -> None:
        """Append a row that is not of a tensor that an operator reads or writes."""
        place = (
            position,
            NO_ITEM,
            what,
            flags,
            self._number_of_thread() if thread is None else thread,
        )
        self._stream.add_row(
            order, op, self._step, execution, NOBODY, type_, *place, digest, *norms
        )

    def _one(
        self,
        tensor: Any,
        op: Op,
        what: int,
        order: int,
        execution: Execution,
        position: int,
        item: int,
    ) -> None:
        facts = op.facts
        dtype = facts.dtype(tensor)
        flags, producer, norm, largest = 0, NOBODY, 0.0, 0.0
        digest: int | None
        version = facts.version(tensor)
        made = self._known.get(tensor) if what == INPUT else None
        if made is not None and made.step < self._step:
            flags |= KEPT
        if made is not None and (version is None or version != made.version):
            # It has been written since, and the write was counted. Operators replace what is known
            # of all that they write, so that this one wrote a view, which may be a part.
            flags |= UNWRITTEN * made.unwritten
            made = None
        visit = None
        is_overwritten = what == INPUT and position == 0 and op.overwrites
        if self.level != "operators":
            visit = self._visit(op)
            if self.level == "steps":
                is_inside = made is not None and self._began <= made.producer < NOBODY
            else:
                is_inside = made is not None and made.producer in visit.orders
            if made is not None and is_inside and (is_overwritten or not made.unwritten):
                return  # It stays within the module or the step.
        if dtype in _HANDLES:
            digest, flags = None, flags | HANDLE
        elif made is not None and self._is_reused(made, facts.nbytes(tensor)):
            digest, flags = made.digest, flags | REUSED
        else:
            digest = self._digest(tensor, facts)
        if made is not None and digest is not None:
            producer = made.producer
            flags |= UNWRITTEN * made.unwritten | UNSEEN_WRITER * (digest != made.digest)
        if digest is None and not flags & HANDLE:
            flags |= UNREADABLE
        if is_overwritten:
            flags |= UNWRITTEN
        elif what == INPUT and flags & UNWRITTEN:
            execution.reads_unwritten = True
        elif what == OUTPUT and (op.is_empty or (op.rearranges and execution.reads_unwritten)):
            flags |= UNWRITTEN
        if self.norms and digest is not None and not flags & UNWRITTEN:
            norm, largest, constant = norms_of(tensor, facts)
            flags |= CONSTANT * constant
        if digest is not None and (what == OUTPUT or made is None or digest != made.digest):
            by, unwritten = order if what == OUTPUT else producer, bool(flags & UNWRITTEN)
            made = _Made(version, self._step, self._stretch, digest, by, unwritten)
            self._known.set(tensor, made)
        elif made is not None and digest is not None:
            made.read = self._stretch
        number = self._type(tensor, dtype, facts)
        if visit is not None:
            if not flags & HANDLE:
                kind = self._type_digests[number]
                visit.add(what, op.digest, kind, position, item, digest or 0, flags)
            return
        self._stream.add_row(
            order,
            op.number,
            self._step,
            execution.number,
            producer,
            number,
            position,
            item,
            what,
            flags,
            self._number_of_thread(),
            digest or 0,
            norm,
            largest,
        )

    def _is_reused(self, made: _Made, size: int | None) -> bool:
        """Return True if a tensor of `size` bytes that was read before need not be read again.

        A write through ``.data``, a NumPy array or a collective is not counted.
        """
        if made.read != self._stretch or (size is not None and size < _SMALL):
            return False
        self._checks += 1
        return self._checks % self.check != 0

    def _digest(self, tensor: Any, facts: Facts) -> int | None:
        try:
            return digest_of(contiguous(facts.buffer(tensor)))
        except NotReadableError as error:
            why = str(error)
            self._unreadable[why] = self._unreadable.get(why, 0) + 1
            return None

    def _type(self, tensor: Any, dtype: str, facts: Facts) -> int:
        key = dtype, facts.shape(tensor), str(facts.placement(tensor) or "")
        number = self._types.get(key)
        if number is None:
            number = self._types[key] = len(self._types)
            self._type_digests.append(digest_of(repr(key).encode()))
            shape = key[1]
            self._stream.add_type(key[0], None if shape is None else list(shape), key[2])
        return number

    def _record_states(self) -> None:
        """Record the states of the random generators, once in each step."""
        import numpy.random

        self._states_due = False
        if self._recorder is not None:
            self._recorder.due = False
        state = random.getstate()
        if state != self._python_state[0]:  # To print it takes long, and few programs change it.
            self._python_state = state, digest_of(repr(state).encode())
        digests = {
            "python": self._python_state[1],
            "numpy": digest_of(_bytes_of(numpy.random.get_state())),
        }
        for namespace, facts in self._facts.items():
            for device, content in facts.random_states().items():
                digests[f"{namespace.split('/')[0]} {device}"] = digest_of(content)
        order = self._next()
        for name, digest in digests.items():
            number = self._named("random state", name)
            self._aside(STATE, order, number, self._again(number), digest)

    def _again(self, number: int) -> int:
        """Return how often something that has a row in each step had one in this step before.

        Steps have equal numbers where a tool is applied again.
        """
        times = self._seen[number, self._step] = self._seen.get((number, self._step), -1) + 1
        return times

    def _named(self, kind: str, name: str) -> int:
        """Return the number of something that has rows and is not an operator."""
        number = self._others.get((kind, name))
        if number is None:
            number = self._others[kind, name] = self._add_other(kind, name)
        return number

    def _add_other(self, kind: str, name: str, group: Group | None = None) -> int:
        """Add something that has rows and is not an operator, and return its number."""
        module, phase = ("", "forward") if group is None else (group.module, group.phase)
        described = EitherWayOp(0, kind, None, name, module, None, "", phase=phase, zone="state")
        self._stream.add_op(described, [])
        self._count += 1
        return self._count - 1


class _Keeper:
    """Answers what a driver's recorder asks, for values that it cannot read itself.

    Args:
        tool: The tool, which is not kept alive.
        facts: The facts of the driver.
        lock: That of the tool.

    Attributes:
        recorder: Leads to the recorder, once there is one.
    """

    def __init__(self, tool: Fingerprint, facts: Facts, lock: AbstractContextManager[Any]) -> None:
        self._tool: Fingerprint = weakref.proxy(tool)
        self.facts, self._lock = facts, lock
        self.recorder: Callable[[], Recorder | None] = lambda: None
        #: What is known of tensors to which nothing may refer while no tool is applied.
        self._kept: Known[Sequence[Any]] = Known()
        add_holder(self)

    def flush(self) -> None:
        with self._lock:  # Of two threads, both would write the same rows.
            self._tool._stream.flush()

    def number_of_type(self, tensor: Any) -> int:
        with self._lock:
            return self._tool._type(tensor, self.facts.dtype(tensor), self.facts)

    def digest_of_type(self, number: int) -> int:
        return self._tool._type_digests[number]

    def digest(self, tensor: Any) -> int | None:
        return self._tool._digest(tensor, self.facts)

    def version(self, tensor: Any) -> int | None:
        return self.facts.version(tensor)

    def norms(self, tensor: Any) -> tuple[float, float, bool]:
        return norms_of(tensor, self.facts)

    def thread(self) -> int:
        with self._lock:
            return self._tool._number_of_thread()

    def record_states(self) -> None:
        with self._lock:
            self._tool._record_states()

    def kept(self, tensor: Any) -> Sequence[Any] | None:
        known = self._kept.get(tensor)
        self._kept.pop(tensor)
        return known

    def let_go(self, kind: type, witness: Witness) -> None:
        recorder = self.recorder()
        if recorder is None:
            return
        for tensor, known in recorder.take():
            self._kept.set(tensor, known)
        self._kept.let_go(kind, witness)
        recorder.has_kept = len(self._kept) > 0


def _listed(numbers: list[int] | None) -> list[int] | None:
    return None if numbers is None else sorted(set(numbers))


def _bytes_of(state: Any) -> bytes:
    """Return the state of NumPy's generator as bytes; to print its array takes longer than a step
    of a small model.
    """
    if not isinstance(state, tuple):
        return repr(state).encode()
    name, keys, *rest = state
    return bytes(keys.tobytes()) + repr((name, rest)).encode()


def norms_of(tensor: Any, facts: Facts) -> tuple[float, float, bool]:
    """Return the 2-norm and the largest magnitude, and whether all elements are equal.

    The norms are 0 where they mean nothing.
    """
    import numpy

    dtype = facts.dtype(tensor)
    try:
        values = numpy.asarray(numbers(facts.view(tensor), dtype)).ravel()
    except NotReadableError:  # Its bytes are known, but it is not an array of numbers.
        return 0.0, 0.0, False
    if not values.size:
        return 0.0, 0.0, True
    if "float" not in dtype and "complex" not in dtype:
        return 0.0, 0.0, bool((values == values[0]).all())
    with numpy.errstate(all="ignore"):
        if values.dtype.kind == "c":
            magnitudes = numpy.abs(values)
            norm, largest = float(numpy.linalg.norm(values)), float(magnitudes.max())
            return norm, largest, bool((values == values[0]).all())
        norm = float(numpy.dot(values, values)) ** 0.5 if values.itemsize > 2 else numpy.inf
        if not numpy.isfinite(norm):  # Squares may overflow where the norm does not.
            norm = float(numpy.linalg.norm(values.astype("float64")))
        high, low = float(values.max()), float(values.min())
        # Those of doubles may be beyond the 32 bits of a row.
        largest = float(numpy.float32(max(abs(high), abs(low))))
        return float(numpy.float32(norm)), largest, high == low
