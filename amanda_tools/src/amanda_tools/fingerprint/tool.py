"""`Fingerprint`: record an exact digest of every value that the operators of a run read and write.

Decides what is recorded and when. `files` writes it, and `amanda_tools.diff` compares two runs.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ClassVar

from amanda_core import OpContext
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.runtime.weak import Known
from amanda_tools.fingerprint.files import (
    CONSTANT,
    HANDLE,
    INPUT,
    KEPT,
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
from amanda_tools.fingerprint.result import FingerprintResult
from amanda_tools.kit.operators.entries import REARRANGING, EitherWayOp
from amanda_tools.kit.operators.tool import OperatorTool, runs_in_order
from amanda_tools.kit.tensors.values import facts_of, need_numpy, numbers

__all__ = ["Fingerprint", "norms_of"]

#: Types that write all of their first input, if they work in place.
_WRITES = frozenset({"random", "full", "assign"})
#: Further threads share a number.
_MOST_THREADS = 0xFFFF
#: Dtypes of handles of variables and the like, which have no values of their own.
_HANDLES = frozenset({"resource", "variant"})


@dataclass(frozen=True, slots=True)
class _Made:
    """What is known of a tensor that an operator wrote or read."""

    version: int | None
    step: int
    digest: int
    #: Order of the row of the operator that wrote it.
    producer: int
    unwritten: bool


class Fingerprint(OperatorTool["_Op"]):
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
        backward: Record gradients as well. Without them, compiled callables stay compiled.
        check: Of so many inputs whose tensor version says that nothing has written them since their
            last digest was made, one is read again. 1 reads all, since not all writes are counted.

    Raises:
        ValueError: An option has an invalid value, or the folder has a fingerprint already.
        ImportError: NumPy is not installed.

    >>> tool = Fingerprint(steps=[0, 1])
    """

    needs: ClassVar[tuple[str, ...]] = ("facts",)
    # It must see the values of the program, with all that other tools do to them.
    outermost: ClassVar[bool] = True
    changes_values: ClassVar[bool | None] = False
    _form: ClassVar[type[FingerprintResult]] = FingerprintResult

    def __init__(
        self,
        norms: bool = False,
        steps: list[int] | None = None,
        folder: Path | None = None,
        everything: bool = True,
        backward: bool = True,
        check: int = 1,
    ) -> None:
        super().__init__(everything)
        if check < 1:
            raise ValueError(f"check must be 1 or more, but is {check}")
        need_numpy()
        self.norms = norms
        self.steps = None if steps is None else frozenset(steps)
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="amanda-fingerprint-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._stream = Stream(Path(folder))
        weakref.finalize(self, self._stream.close)
        self._types: dict[tuple[object, ...], int] = {}
        self._local = threading.local()
        #: Number of threads so far.
        self._threads = 0
        self._known: Known[_Made] = Known()
        #: The drivers' facts, by namespace.
        self._facts: dict[str, Facts] = {}
        self._unreadable: dict[str, int] = {}
        self._order = -1
        #: Number of operators so far.
        self._count = 0
        self.check = check
        self._checks = 0
        self._step, self._takes = 0, self.steps is None or 0 in self.steps
        #: Numbers of what is not an operator, by kind and name.
        self._others: dict[tuple[str, str], int] = {}
        self._states_due = True
        self.add_inst_for_op(self.analyse)
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)
        self.add_inst_for_step(self.begin)

    def analyse(self, context: OpContext) -> None:
        """Insert routines that record the inputs and outputs of an operator."""
        if not self.is_wanted(context):
            return
        op = self._op(context)
        context.insert_before_op(self.enter, observe=True, op=op)
        context.insert_after_op(self.leave, observe=True, op=op)

    def analyse_backward(self, context: OpContext) -> None:
        """Insert routines that record the gradients that a backward operator reads and writes."""
        if not self.is_wanted(context):
            return
        op = self._op(context)
        context.insert_before_backward_op(self.enter, observe=True, op=op)
        context.insert_after_backward_op(self.leave, observe=True, op=op)

    def begin(self, step: int) -> None:
        """Record the number of the step, and whether it is recorded."""
        with self._lock:
            self._step = step
            self._takes = self.steps is None or step in self.steps
            self._states_due = True
            # What is in the buffer is on the disk at the latest after each step.
            self._stream.flush()

    def enter(self, *inputs: Any, op: _Op) -> None:
        """Record the inputs of one execution."""
        begin = perf_counter_ns()
        with self._lock:
            execution = op.enter()
            if self._takes:
                if self._states_due:
                    self._record_states()
                self._add_rows(inputs, op, INPUT, execution)
                self._clock.add(begin, perf_counter_ns())

    def leave(self, *outputs: Any, op: _Op) -> None:
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
            notes = [*self._notes, *self.not_seen()]
            notes += [
                f"{count} tensors without a digest: {why}"
                for why, count in self._unreadable.items()
            ]
            self._stream.end(notes)
            return self._form.of(
                self._stream, notes, self._clock.spent / 1e9, self._clock.wall / 1e9, self
            )

    def _op(self, context: OpContext) -> _Op:
        facts = facts_of(context)
        if not context.supports("ordered"):
            self._notes.setdefault(
                f"on {context.namespace} routines run in any order: the first difference is the "
                "first that was recorded, not the first of the program"
            )
        self._facts.setdefault(context.namespace, facts)
        return self.account_of(context, lambda: self._new_op(context, facts))

    def _new_op(self, context: OpContext, facts: Facts) -> _Op:
        described = EitherWayOp.of(context)
        names = [] if context.is_backward() else list(context.input_names)
        self._stream.add_op(described, names, self._weights_of(context))
        self._count += 1
        return _Op(context, described, facts, self._count - 1)

    def _weights_of(self, context: OpContext) -> list[tuple[int, int, str]] | None:
        """Return the position, item and name of each weight, for those who need them."""
        return None

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _thread(self) -> int:
        # The system gives the number of a thread that has ended to another one.
        try:
            number: int = self._local.number
        except AttributeError:
            number = self._local.number = min(self._threads, _MOST_THREADS)
            self._threads += 1
        return number

    def _add_rows(self, values: Sequence[Any], op: _Op, what: int, execution: _Execution) -> None:
        order, recorded = self._next(), False
        for position, value in enumerate(values):
            if op.facts.is_tensor(value):
                self._one(value, op, what, order, execution, position, NO_ITEM)
                recorded = True
            elif isinstance(value, (list, tuple)):
                for item, inner in enumerate(value):
                    if op.facts.is_tensor(inner):
                        place = min(item, NO_ITEM - 1)
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
    ) -> None:
        """Append a row that is not of a tensor that an operator reads or writes."""
        place = position, NO_ITEM, what, flags, self._thread()
        self._stream.add_row(
            order, op, self._step, execution, NOBODY, type_, *place, digest, *norms
        )

    def _one(
        self,
        tensor: Any,
        op: _Op,
        what: int,
        order: int,
        execution: _Execution,
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
            made = None  # It has been written since, and the write was counted.
        if dtype in _HANDLES:
            digest, flags = None, flags | HANDLE
        elif made is not None and self._is_reused(made):
            digest, flags = made.digest, flags | REUSED
        else:
            digest = self._digest(tensor, facts)
        if made is not None and digest is not None:
            producer = made.producer
            flags |= UNWRITTEN * made.unwritten | UNSEEN_WRITER * (digest != made.digest)
        if digest is None and not flags & HANDLE:
            flags |= UNREADABLE
        if what == INPUT and position == 0 and op.overwrites:
            flags |= UNWRITTEN
        elif what == INPUT and flags & UNWRITTEN:
            execution.reads_unwritten = True
        elif what == OUTPUT and (op.is_empty or (op.rearranges and execution.reads_unwritten)):
            flags |= UNWRITTEN
        if self.norms and digest is not None and not flags & UNWRITTEN:
            norm, largest, constant = norms_of(tensor, facts)
            flags |= CONSTANT * constant
        if digest is not None and (what == OUTPUT or made is None or digest != made.digest):
            by = order if what == OUTPUT else producer
            self._known.set(tensor, _Made(version, self._step, digest, by, bool(flags & UNWRITTEN)))
        self._stream.add_row(
            order,
            op.number,
            self._step,
            execution.number,
            producer,
            self._type(tensor, dtype, facts),
            position,
            item,
            what,
            flags,
            self._thread(),
            digest or 0,
            norm,
            largest,
        )

    def _is_reused(self, made: _Made) -> bool:
        """Return True if a tensor that was written before need not be read again.

        A write through ``.data``, a NumPy array or a collective is not counted.
        """
        self._checks += 1
        return made.step == self._step and self._checks % self.check != 0

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
            shape = key[1]
            self._stream.add_type(key[0], None if shape is None else list(shape), key[2])
        return number

    def _record_states(self) -> None:
        """Record the states of the random generators, once in each step."""
        import numpy.random

        self._states_due = False
        states = {
            "python": repr(random.getstate()).encode(),
            "numpy": repr(numpy.random.get_state()).encode(),
        }
        for namespace, facts in self._facts.items():
            for device, state in facts.random_states().items():
                states[f"{namespace.split('/')[0]} {device}"] = state
        order = self._next()
        for name, state in states.items():
            self._aside(
                STATE, order, self._named("random state", name), self._step, digest_of(state)
            )

    def _named(self, kind: str, name: str) -> int:
        """Return the number of something that has rows and is not an operator."""
        number = self._others.get((kind, name))
        if number is None:
            number = self._others[kind, name] = self._count
            self._count += 1
            self._stream.add_op(EitherWayOp(0, kind, None, name, "", None, "", zone="state"), [])
        return number


@dataclass(slots=True)
class _Execution:
    """One execution of an operator.

    Attributes:
        number: Number of its earlier executions, in any thread.
        reads_unwritten: Whether it reads memory that nothing has written.
    """

    number: int
    reads_unwritten: bool = False


class _Op:
    def __init__(
        self, context: OpContext, described: EitherWayOp, facts: Facts, number: int
    ) -> None:
        self.number = number
        self.facts = facts
        self._in_order = runs_in_order(context.namespace)
        word, backward = described.word, described.phase == "backward"
        self.is_empty = not backward and word == "empty"
        self.rearranges = not backward and (word in REARRANGING or word == "cast")
        self.overwrites = not backward and word in _WRITES and described.type.endswith("_")
        self._entered = self._left = 0
        #: Executions in progress by thread, where routines run with their operator.
        self._running: dict[int, _Execution] = {}

    def enter(self) -> _Execution:
        """Return the execution that begins."""
        self._entered += 1
        execution = _Execution(self._entered - 1)
        if self._in_order:
            self._running[threading.get_ident()] = execution
        return execution

    def leave(self) -> _Execution:
        """Return the execution that ends."""
        self._left += 1
        if not self._in_order:
            return _Execution(self._left - 1)
        # A framework's workers may begin a backward operator in one thread and end it in another.
        running = self._running
        thread = threading.get_ident()
        if thread not in running and running:
            thread = next(reversed(running))
        return running.pop(thread, None) or _Execution(self._entered - 1)


def norms_of(tensor: Any, facts: Facts) -> tuple[float, float, bool]:
    """Return the 2-norm and the largest magnitude, and whether all elements are equal.

    The norms are 0 where they mean nothing.
    """
    import numpy

    dtype = facts.dtype(tensor)
    try:
        values = numpy.asarray(numbers(facts.view(tensor), dtype)).ravel()
    except NotReadableError:  # Its bytes are known, but it is no array of numbers.
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
