"""`Latency`: time each operator, forward and backward, on the CPU and on a device.

Decides what is timed when. Nested and overlapping times are computed in `intervals`, devices are
timed in `device_events` and `kernels`, and the result is in `result`. One class of over 600 lines,
a third of them documentation: nearly every method changes the state of the step that is timed.
"""

from __future__ import annotations

import statistics
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from amanda_core import OpContext
from amanda_core.driver_kit.marks import LIMIT, Marks
from amanda_core.engine.action import Routine
from amanda_core.engine.selection import Selection, select
from amanda_core.engine.session import COMPILED_CALL, COMPILED_KERNEL
from amanda_tools.kit.operators.tool import OperatorTool, is_eager
from amanda_tools.kit.output.chrome import Span
from amanda_tools.kit.output.rendering import format_count
from amanda_tools.kit.tensors.types import dtype_of
from amanda_tools.kit.tensors.values import facts_of, tensors_in
from amanda_tools.latency.device_events import CudaEvents, EventPairs, Events, Pair
from amanda_tools.latency.intervals import Between, Interval, Overlapping, Stack
from amanda_tools.latency.kernels import Kernel, Kernels
from amanda_tools.latency.result import LatencyResult
from amanda_tools.latency.runs import Runs
from amanda_tools.latency.times import (
    DRIVER,
    MOST_WARM_UP,
    Samples,
    StepTime,
    ThreadTime,
    TimedOp,
    warm_up,
)

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Latency"]


class Latency(OperatorTool["_Op"]):
    """Times each operator, forward and backward, by step, module and thread.

    Args:
        backward: Time backward operators as well.
        everything: Include operators outside the model, such as those of an optimizer. Without them
            the operators of a step do not add up to its time.
        limit: Number of executions in the trace file; later ones are only counted.
        uncompiled: Run functions that JAX has jitted operator by operator, and time the operators
            of programs that Inductor compiles as they were traced. What the compiler fuses is not
            fused then. Without it, a call of a jitted function is timed as a whole, and programs of
            Inductor by call and kernel.
        kernels: Find the kernels that each operator starts, with PyTorch's profiler. This costs far
            more than the timing.
        warmup: Number of first steps that are left out of all figures but those of the steps, as
            the framework initializes and tools analyse there. None for the first step and those
            after it, at most ten, that took over one and a half times the median of the later ones.
            They count if no later step ends, and with `kernels`. Unless it is 0, each first step
            after those without the profiler is left out as well, for the same reason.

    Raises:
        ValueError: `limit` or `warmup` is negative.

    >>> tool = Latency(limit=1000)
    """

    needs = ("ordered",)
    immediate = True
    sees_compiled_calls = True
    #: The clock, in nanoseconds.
    now = staticmethod(time.perf_counter_ns)
    #: Factory of device events.
    events: ClassVar[type[Events]] = CudaEvents
    #: PyTorch device types that run asynchronously and have events.
    asynchronous: ClassVar[frozenset[str]] = frozenset({"cuda"})

    figures = dict.fromkeys(("step_median", "step_p95"), "s")

    def __init__(
        self,
        backward: bool = True,
        everything: bool = True,
        limit: int = 100_000,
        kernels: bool = False,
        warmup: int | None = None,
        uncompiled: bool = False,
    ) -> None:
        super().__init__(everything)
        self.uncompiled = uncompiled
        for name, number in (("limit", limit), ("warmup", warmup)):
            if number is not None and number < 0:
                raise ValueError(f"{name} must not be negative, but is {number}")
        self.limit = limit
        self.warmup = 0 if kernels else warmup
        #: The accounts of the first steps, of which some are the warm-up.
        self._first: list[_Account] = []
        #: Those of the steps in which tools analyse again, and of what was between them.
        self._later: list[_Account] = []
        #: The steps without the profiler.
        self._plain: list[StepTime] = []
        self.where(None)
        self._steps: list[StepTime] = []
        self._step_begin = 0
        #: Time of the tool's last work; 0 before the first operator, which starts step 0.
        self._last = 0
        #: The execution that started last, and when the tool was called for it, until that counts.
        self._entered: tuple[int, Interval[_Op]] | None = None
        self._threads: dict[int, _Thread] = {}
        #: When operators of graphs were reached: twice the number of the operator, and 1 more if it
        #: was its end.
        self._marks = Marks(self._take_marks, self.now)
        self._has_graphs = False
        #: id of the numbers of a series of marks -> these, and the runs of the program.
        self._runs: dict[int, tuple[Sequence[int], Runs[_Op]]] = {}
        self._graph: Overlapping[_Op] = Overlapping()
        self._between = Between()
        self._by_number: list[_Op] = []
        #: Five numbers of each execution for the trace file, so that nothing is left for Python's
        #: garbage collector to look through: operator, track, start, end, step.
        self._executions = array("q")
        #: Name of a track -> its number.
        self._tracks: dict[str, int] = {}
        self._left_out = 0
        #: Names of graph operators whose start cannot be observed.
        self._unseen: set[str] = set()
        self._pairs = EventPairs(self.events())
        #: Device -> time at which its first event was recorded.
        self._origins: dict[str, int] = {}
        self._kernels = Kernels() if kernels else None
        self.result_is_final = kernels  # It ends the profile.
        self._found: list[Kernel] = []
        self.add_inst_for_op(self.analyse)
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)
        self.add_inst_for_step(self.begin_step, self.end_step)
        self.add_inst_for_end(self._end)

    def where(self, selection: Selection | None) -> Self:
        """Restrict the profiler to a selection; a few steps run without it, see the title."""
        timed = ~select(steps=_PLAIN)
        return super().where(timed if selection is None else selection & timed)

    def analyse(self, context: OpContext) -> None:
        """Insert routines that time the executions of an operator."""
        if self._is_timed_here(context) and self.is_wanted(context):
            values = context.get_inputs() or ()
            op = self._op_of(context, values)
            if self.uncompiled:
                framework = context.namespace.partition("/")[0]
                if framework != "pytorch":
                    self._notes.setdefault(_UNCOMPILED if framework == "jax" else _NO_EFFECT)
            if op.waits_unseen(context.get_op(), values):
                self._unseen.add(context.name)
                return
            if op.facts.waits:  # The program may execute others until it waits for this one.
                context.insert_after_op(self.wait, observe=True, outputs=[], op=op, context=context)
                return
            (enter, start), (leave, end) = self._routines(op)
            inputs = op.awaited(values)
            context.insert_before_op(enter, observe=True, inputs=inputs, **start)
            context.insert_after_op(leave, observe=True, outputs=op.results, **end)

    def analyse_backward(self, context: OpContext) -> None:
        """Insert routines that time the executions of a backward operator."""
        if self._is_timed_here(context) and self.is_wanted(context):
            values = context.get_grad_outputs() or ()
            op = self._op_of(context, values)
            if op.waits_unseen(context.get_backward_op(), values):
                self._unseen.add(context.name)
                return
            (enter, start), (leave, end) = self._routines(op)
            grads = op.awaited(values)
            context.insert_before_backward_op(enter, observe=True, grad_outputs=grads, **start)
            context.insert_after_backward_op(leave, observe=True, grad_inputs=op.results, **end)

    def _is_timed_here(self, context: OpContext) -> bool:
        """Return False for an operator that is timed with the kernel that computes it, or that is
        not fused for this tool.
        """
        is_kernel = context.op_type in (COMPILED_CALL, COMPILED_KERNEL)
        if not (is_kernel or _in_kernels(context)):
            return True
        return is_kernel != self.uncompiled

    def enter(self, *values: Any, op: _Op) -> None:
        """Start the time of one execution."""
        arrived = self.now()
        with self._lock:
            thread = self._threads.get(threading.get_ident()) or self._new_thread()
            if self._entered is not None or self._has_graphs:
                self._settle()
            if not self._last:
                self._step_begin = arrived
            self._between.end(arrived, op.module)
            marks = _NO_MARKS
            if op.device is not None or self._kernels is not None:
                marks = self._begin_marks(op, thread.stack.innermost)
            interval = thread.stack.enter(op, arrived, marks)
            self._entered = arrived, interval
            # Last, so that as little of the tool as possible is in the operator's time.
            interval.start = interval.end = self.now()

    def leave(self, *values: Any, op: _Op) -> None:
        """End the time of one execution."""
        if values:
            op.tensors.wait(values)
        end = self.now()
        with self._lock:
            thread = self._threads.get(threading.get_ident()) or self._new_thread()
            self._settle()
            self._between.end(end, op.module)
            interval = thread.stack.leave(op, end)
            if interval is None and op.facts.phase == "backward":
                # A framework's workers may begin it in one thread and end it in another.
                others = self._threads.values()
                thread = next((other for other in others if op in other.stack), thread)
                interval = thread.stack.leave(op, end)
            if thread.stack.dropped:
                self._give_up(thread)
            if interval is not None:
                if interval.marks is not _NO_MARKS:
                    self._end_marks(interval)
                self._count(interval, thread)
            done = self.now()
            thread.stack.spent(done - end)
            self._spent(end, done)
            # Mostly this thread is the only one.
            if thread.stack.innermost is None and not self._is_running:
                self._between.begin(done, op.module)

    def wait(self, op: _Op, context: OpContext) -> None:
        """Count one execution of a collective: the time that the program spent in it."""
        end = self.now()
        with self._lock:
            thread = self._threads.get(threading.get_ident()) or self._new_thread()
            self._settle()
            begin = max(end - round(1e9 * context["wait"]), self._last)
            if not self._last:
                self._step_begin = begin
            self._between.end(begin, op.module)
            self._count(Interval(op, begin, end), thread)
            done = self.now()
            thread.stack.spent(done - begin)
            self._spent(end, done)
            if not self._is_running:
                self._between.begin(done, op.module)

    def _routines(self, op: _Op) -> list[tuple[Routine, dict[str, Any]]]:
        """Return the routines before and after an operator, and their arguments."""
        if not op.is_graph:
            return [(self.enter, {"op": op}), (self.leave, {"op": op})]
        self._has_graphs = True
        return [(self._marks.note, {"number": 2 * op.number + end}) for end in (0, 1)]

    def _take_marks(self) -> None:
        """Count the executions in graphs since the last call, whose times were only recorded."""
        with self._lock:
            begin = last = self.now()
            for mark, at, ident in self._marks.take():
                op = self._by_number[mark >> 1]
                if not self._last:
                    self._step_begin = at
                    self._clock.add(at, at)
                self._between.end(at, op.module)
                if mark & 1:
                    interval = self._graph.leave(op, at)
                    if interval is not None:
                        self._count(interval, self._threads.get(ident) or self._new_thread(ident))
                    if not self._is_running:
                        self._between.begin(at, op.module)
                else:
                    self._graph.enter(op, at)
                self._last = last = at
            for numbers, times, ident in self._marks.take_runs():
                self._take_run(numbers, times, ident)
                last = self._last
            if last != begin:
                done = self.now()
                if self._between.end(begin, ""):
                    self._between.begin(done, "")
                self._spent(begin, done)

    def _take_run(self, numbers: Sequence[int], times: Sequence[int], ident: int) -> None:
        """Count a run of a compiled program in its step and thread, and keep its times."""
        known = self._runs.get(id(numbers))
        if known is None:
            known = self._runs[id(numbers)] = numbers, Runs(numbers, self._by_number.__getitem__)
        runs, thread = known[1], self._threads.get(ident) or self._new_thread(ident)
        if not self._last:
            self._step_begin = times[0]
            self._clock.add(times[0], times[0])
        for one in runs.outermost:
            start, end = times[one.start], times[one.end]
            self._between.end(start, one.what.module)
            thread.stack.spent(end - start)  # An operator around it, such as one of autograd.
            thread.time.self += end - start
            if self._steps:
                self._steps[-1].ops += end - start
            if not self._is_running:
                self._between.begin(end, one.what.module)
            self._last = end
        thread.time.calls += len(runs.operators)
        if self._steps:
            self._steps[-1].calls += len(runs.operators)
        runs.add(times, thread.time.name, self._step)
        if len(runs) >= LIMIT:
            self._attribute()

    def _attribute(self) -> None:
        """Count the operators inside the runs of compiled programs."""
        for _, runs in self._runs.values():
            accounts, executions = runs.take()
            for op, totals, own in accounts:
                op.facts.add_all(totals, own)
                for total in totals:
                    op.samples.add(total)
            for execution in executions:
                self._keep(*execution)

    def begin_step(self, number: int) -> None:
        """Record the start of a step."""
        with self._lock:
            self._settle()
            if number in _AGAIN and self.warmup != 0 and self._is_past_first:
                # The accounts so far stay apart from those of this step.
                self._close(-number, self._later)
            self._step_begin = self.now()
            self._steps.append(StepTime(number))
            self._between.drop()
            if self._last and number not in _PLAIN:
                self._between.begin(self._step_begin, "")

    def end_step(self, number: int) -> None:
        """Record the end of a step."""
        with self._lock:
            self._settle()
            if self._steps:
                step, now = self._steps[-1], self.now()
                step.wall, step.ended = now - self._step_begin, True
                if step.calls:
                    self._between.end(now, "")
                elif number in _PLAIN:
                    self._plain.append(step)
            self._clear()
            if self._steps[-1:] and self._steps[-1].calls:
                self._end_first(self._steps[-1])

    def _end(self) -> None:
        with self._lock:
            self._settle()
            # PyTorch crashes if its profiler is stopped in the range of an operator that raised.
            self._clear()
            self._end_kernels()

    def _end_kernels(self) -> None:
        if self._kernels is not None:
            self._found += self._kernels.found()

    def result(self) -> LatencyResult:
        """Return what has been timed so far."""
        with self._lock:
            self._settle()
            if self._kernels is not None:  # Operators that run now are timed when they end.
                self._clear()
            self._pairs.finish()
            self._attribute()
            self._end_kernels()
            steps = [replace(step) for step in self._steps if step.calls]
            if steps and not steps[-1].ended:
                steps[-1].wall = self._last - self._step_begin
            again = _AGAIN if self.warmup != 0 else frozenset()
            first = [step for step in steps if step.ended and step.number not in again]
            left_out = {step.number for step in first[: self._warm_up(first)]}
            for step in steps:
                step.warm_up = step.number in left_out or (step.ended and step.number in again)
            left_out |= again
            accounts = [a for a in (*self._first, *self._later) if a.step not in left_out]
            keys = [account.step for account in accounts]
            ops, kernels = self._timed_ops(keys)
            threads = [thread.summary(keys) for thread in self._threads.values()]
            threads = [thread for thread in threads if thread.calls]
            between, busy, total = dict(self._between.times), self._graph.busy, self._graph.total
            for account in accounts:
                between = _added(between, account.between)
                busy, total = busy + account.busy, total + account.total
            # Of two, the mean: the smaller one is often too small.
            measured = [step.wall for step in self._plain if step.number in _MEASURED]
            plain = round(statistics.median(measured)) if measured else None
            if plain is not None:
                if len(threads) == 1 and not total:  # Those of several threads may overlap.
                    _subtract_inside(ops, steps, threads[0], max(measured))
                _charge_driver(steps, plain)
                between = _without_driver(between, steps)
            for op in ops:
                op.estimate()
            return LatencyResult(
                ops,
                steps,
                threads,
                busy,
                total,
                self._notes_of(ops, kernels, busy, total),
                self._left_out,
                self._clock.spent / 1e9,
                self._clock.wall / 1e9,
                self._spans(),
                kernels,
                between,
                plain,
                plain_steps=[replace(step) for step in self._plain],
            )

    def _warm_up(self, steps: Sequence[StepTime]) -> int:
        """Return how many of these steps are the warm-up."""
        times = [step.wall for step in steps]
        if len(times) <= (self.warmup or 0):
            return 0  # A warm-up alone is better than nothing.
        return warm_up(times) if self.warmup is None else self.warmup

    def _timed_ops(self, keys: Sequence[int]) -> tuple[list[TimedOp], list[Kernel]]:
        """Return the operators that were timed, and the kernels with the places of these."""
        places: dict[int, int] = {}
        ops: list[TimedOp] = []
        for op in self._ops.values():
            facts = op.summary(keys)
            if facts.calls or facts.unfinished:
                places[op.number] = len(ops)
                ops.append(facts)
        kernels = [k._replace(op=places.get(-1 if k.op is None else k.op)) for k in self._found]
        for kernel in kernels:
            if kernel.op is not None:
                ops[kernel.op].kernels += 1
                ops[kernel.op].kernel_time += kernel.duration
        return ops, kernels

    @property
    def _is_past_first(self) -> bool:
        return len(self._first) >= (MOST_WARM_UP if self.warmup is None else self.warmup)

    def _end_first(self, step: StepTime) -> None:
        """Begin new accounts after a step that may be left out."""
        if not self._is_past_first:
            self._close(step.number, self._first)
        elif step.number in _AGAIN and self.warmup != 0:
            self._close(step.number, self._later)

    def _close(self, key: int, accounts: list[_Account]) -> None:
        """Begin new accounts, and keep those so far by a key."""
        self._attribute()
        for op in self._ops.values():
            op.close(key)
        for thread in self._threads.values():
            thread.close(key)
        accounts.append(_Account(key, self._between.times, self._graph.busy, self._graph.total))
        self._between.forget()
        self._graph.busy = self._graph.total = 0

    def _op_of(self, context: OpContext, values: Sequence[Any]) -> _Op:
        op = self.account_of(context, lambda: self._new_op(context))
        op.device = op.facts.device = self._device_of(op, values)
        return op

    def _new_op(self, context: OpContext) -> _Op:
        self._by_number.append(_Op(context, len(self._by_number)))
        return self._by_number[-1]

    def _device_of(self, op: _Op, values: Sequence[Any]) -> str | None:
        if op.is_torch:
            for _, tensor in tensors_in(op.tensors, values):
                device = op.tensors.device(tensor)
                if device.partition(":")[0] in self.asynchronous:
                    return device
        return None

    def _new_thread(self, ident: int | None = None) -> _Thread:
        ident = threading.get_ident() if ident is None else ident
        known = (thread.name for thread in threading.enumerate() if thread.ident == ident)
        # A framework's own thread may never have run Python.
        thread = self._threads[ident] = _Thread(next(known, f"thread {len(self._threads) + 1}"))
        return thread

    def _begin_marks(self, op: _Op, outer: Interval[_Op] | None) -> _Marks:
        pair = inside = None
        if op.device is not None:
            self._origins.setdefault(op.device, self.now())
            pair = self._pairs.begin(op.device, outer.marks.pair if outer is not None else None)
        if self._kernels is not None and op.is_torch:
            inside = self._kernels.begin(op.number)
        return _Marks(pair, inside)

    def _end_marks(self, interval: Interval[_Op]) -> None:
        if interval.marks is None:
            return
        pair, inside = interval.marks
        if pair is not None:
            self._pairs.end(pair, partial(self._on_device, interval.what, pair, self._step))
        if inside is not None and self._kernels is not None:
            self._kernels.end(inside)

    def _on_device(self, op: _Op, pair: Pair, step: int, start: int, total: int, own: int) -> None:
        facts = op.closed[step][0] if step in op.closed else op.facts
        facts.device_total += total
        facts.device_self += own
        start += self._origins[pair.device]
        self._keep(op, pair.stream, start, start + total, step)

    def _count(self, interval: Interval[_Op], thread: _Thread) -> None:
        op, total = interval.what, interval.end - interval.start
        own = total - interval.inner
        op.facts.add(total, own)
        op.samples.add(total)
        of_thread = thread.time
        of_thread.calls += 1
        of_thread.self += own
        number = 0
        if self._steps:
            step = self._steps[-1]
            number = step.number
            step.calls += 1
            if not op.is_graph:
                step.ops += own
        self._keep(op, of_thread.name, interval.start, interval.end, number)

    def _keep(self, op: _Op, track: str, start: int, end: int, step: int) -> None:
        if len(self._executions) < _PER_EXECUTION * self.limit:
            number = self._tracks.setdefault(track, len(self._tracks))
            self._executions.extend((op.number, number, start, end, step))
        else:
            self._left_out += 1

    def _spans(self) -> list[Span]:
        tracks, found = list(self._tracks), []
        for number, track, start, end, step in zip(
            *[iter(self._executions)] * _PER_EXECUTION, strict=True
        ):
            op = self._by_number[number].facts
            facts = {"id": op.id, "type": op.type, "module": op.module, "source": op.source}
            arguments = {**facts, "forward": op.forward, "step": step}
            found.append(Span(tracks[track], op.name, start, end, op.phase, arguments))
        return found

    @property
    def _is_running(self) -> bool:
        """Return True if an operator is running on any thread."""
        return bool(self._graph.running) or any(
            thread.stack.innermost is not None for thread in self._threads.values()
        )

    @property
    def _step(self) -> int:
        return self._steps[-1].number if self._steps else 0

    def _give_up(self, thread: _Thread) -> None:
        for interval in thread.stack.take_dropped():
            interval.what.facts.unfinished += 1
            if interval.marks.inside is not None and self._kernels is not None:
                self._kernels.end(interval.marks.inside)

    def _clear(self) -> None:
        for thread in self._threads.values():
            thread.stack.clear()
            self._give_up(thread)
        busy, given_up = self._graph.settle()
        if self._steps:
            self._steps[-1].ops += busy
        for op in given_up:
            op.facts.unfinished += 1

    def _settle(self) -> None:
        """Count the time that the tool took to start the last execution."""
        if self._entered is not None:
            arrived, interval = self._entered
            self._entered = None
            if interval.parent is not None:
                interval.parent.inner += interval.start - arrived
            self._spent(arrived, interval.start)
        if self._has_graphs:
            self._take_marks()

    def _spent(self, start: int, end: int) -> None:
        self._clock.add(start, end)
        self._last = end
        if self._steps:
            self._steps[-1].tool += end - start

    def _notes_of(
        self, ops: Sequence[TimedOp], kernels: list[Kernel], busy: int, total: int
    ) -> list[str]:
        notes = list(self._notes)
        if total:
            notes.append(
                "operators of graphs are timed between two nodes, waiting included, and "
                f"overlap: {total / 1e6:.3f} ms in {busy / 1e6:.3f} ms"
            )
        if self._unseen:
            notes.append(
                f"{format_count(len(self._unseen), 'operator')} of graphs not timed: the begin is "
                "not known where no value is taken from what is waited for (reads of variables, "
                "mostly)"
            )
        unfinished = sum(op.unfinished for op in ops)
        if unfinished:
            notes.append(f"{format_count(unfinished, 'execution')} did not end: not timed")
        if self._kernels is not None and self._kernels.foreign:
            notes.append("the program has a profiler of its own, which has the ranges and kernels")
        nowhere = sum(kernel.op is None for kernel in kernels)
        if nowhere:
            notes.append(f"{format_count(nowhere, 'kernel')} started outside timed operators")
        return notes


class _Account(NamedTuple):
    """The accounts of a step, by its number, or of what came before one, by the negative number."""

    step: int
    between: dict[str, int]
    busy: int
    total: int


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {path: one.get(path, 0) + other.get(path, 0) for path in (*one, *other)}


def _charge_driver(steps: Sequence[StepTime], plain: int) -> None:
    """Count what steps took more than a plain one as time of the driver."""
    for step in steps:
        cost = step.wall - step.tool - plain
        step.driver += max(0, min(step.rest, cost - step.driver))


def _without_driver(between: dict[str, int], steps: Sequence[StepTime]) -> dict[str, int]:
    """Return the time between operators by module, with that of the driver as one of its own."""
    counted = [step for step in steps if not step.warm_up]
    rest, left = sum(step.rest for step in counted), sum(between.values())
    driver = sum(step.driver for step in counted)
    found = (
        {module: time * max(0, rest) // left for module, time in between.items()} if left else {}
    )
    if found and rest > 0:
        largest = max(found, key=lambda module: found[module])
        found[largest] += rest - sum(found.values())
    return found | ({DRIVER: driver} if driver else {})


def _subtract_inside(
    ops: list[TimedOp], steps: list[StepTime], thread: ThreadTime, plain: int
) -> None:
    """Move time from operators to the driver if together they take more than a step without both.

    What the operators of each timed step exceed the longest such step by is certainly not theirs.
    A comparison of medians would subtract noise: of few steps they differ by a tenth and more.
    Each execution has the same part, at most its own time.
    """
    counted = [step for step in steps if step.ended and not step.warm_up]
    inside = min((step.ops for step in counted), default=0) - plain
    if inside <= 0:
        return
    for step in counted:
        step.driver = min(inside, step.ops)
        step.ops -= step.driver
    left, calls = sum(step.driver for step in counted), sum(op.calls for op in ops)
    thread.self -= left
    for op in sorted((op for op in ops if op.calls), key=lambda op: op.self / op.calls):
        part = min(op.self, left * op.calls // calls)
        op.self -= part
        left, calls = left - part, calls - op.calls


def _in_kernels(context: OpContext) -> bool:
    forward = context.forward if context.is_backward() else context
    return forward is not None and bool(forward.get("in_kernels"))


class _Op:
    def __init__(self, context: OpContext, number: int) -> None:
        facts = TimedOp.of(context, waits="wait" in context and not context.is_backward())
        self.facts, self.tensors, self.number = facts, facts_of(context), number
        if held := context.get("operators", ()):
            facts.operators = [one.name for one in held]
            # What the kernel computes, as the common types of the operators.
            facts.word = " + ".join(dict.fromkeys(one["type"] or one.op_type for one in held))
        self.is_graph = not is_eager(facts.namespace)
        #: The positions of the results for which the end of an execution waits; None for all.
        ahead = self.tensors.runs_ahead and not self.is_graph
        self.results: list[int] | None = None if ahead else []
        self.is_torch = facts.namespace.startswith("pytorch/")
        #: None while backward accumulates a gradient, which counts for the previous module.
        self.module = facts.module if facts.phase == "forward" or facts.forward else None
        self.device: str | None = None
        self.samples = Samples()
        #: Key of an account that is kept -> the account and its samples.
        self.closed: dict[int, tuple[TimedOp, Samples]] = {}

    def close(self, key: int) -> None:
        """Begin a new account."""
        if self.facts.calls or self.facts.unfinished:
            self.closed[key], self.samples = (self.facts, self.samples), Samples()
            self.facts = self.facts.emptied()

    def summary(self, keys: Sequence[int]) -> TimedOp:
        """Return a copy of the account, with those that were closed under these keys."""
        found, samples = replace(self.facts), Samples()
        closed = [self.closed[key] for key in keys if key in self.closed]
        for _, earlier in closed:
            samples.extend(earlier)
        samples.extend(self.samples)
        for account, _ in reversed(closed):
            found.merge(account)
        found.median, found.p95, found.spread = samples.quantiles()
        return found

    def awaited(self, values: Sequence[Any]) -> list[int]:
        """Return the positions of the values that a routine must take to be called at the right
        time.

        A graph calls a routine as soon as its values are there. A routine without values would be
        called long before the operator can run. A reference to a variable does not help, because it
        is there before the variable has a value.
        """
        if not self.is_graph:
            return []
        kinds = (dtype_of(self.tensors, value) for value in values)
        return [position for position, kind in enumerate(kinds) if "_ref" not in kind]

    def waits_unseen(self, op: Any, values: Sequence[Any]) -> bool:
        """Return True if a graph operator has to wait for something that none of its values depends
        on.

        A routine before the operator only waits for the values that it takes, and the handle of a
        variable is always there.

        Args:
            op: The framework's operator.
            values: Its inputs.
        """
        if not self.is_graph or not self.facts.namespace.startswith("tensorflow/"):
            return False
        handles = ("resource", "variant", "_ref")
        kinds = [dtype_of(self.tensors, value) or "resource" for value in values]
        told = any(not any(handle in kind for handle in handles) for kind in kinds)
        return not told and bool(getattr(op, "control_inputs", ()))


class _Thread:
    """One thread on which operators run."""

    def __init__(self, name: str) -> None:
        self.stack: Stack[_Op] = Stack()
        self.time = ThreadTime(name)
        #: Key of an account that is kept -> the account.
        self.closed: dict[int, ThreadTime] = {}

    def close(self, key: int) -> None:
        """Begin a new account."""
        self.closed[key], self.time = self.time, ThreadTime(self.time.name)

    def summary(self, keys: Sequence[int]) -> ThreadTime:
        """Return a copy of the account, with those that were closed under these keys."""
        found = replace(self.time)
        for account in (self.closed[key] for key in keys if key in self.closed):
            found.calls += account.calls
            found.self += account.self
        return found


class _Marks(NamedTuple):
    """Measurements that start with an execution: a pair of device events, a range in a profile."""

    pair: Pair | None
    inside: Any


#: Notes about the option `uncompiled`.
_UNCOMPILED = "jitted functions ran operator by operator: what XLA fuses was not fused"
_NO_EFFECT = "uncompiled has no effect on frameworks other than JAX and PyTorch"

_PER_EXECUTION = 5
_NO_MARKS = _Marks(None, None)
#: Steps that run without the profiler, four in a row. In the first the driver analyses operators
#: again, and in the second, gradients may still have something of the profiler, so the times of
#: the others say what a step takes without it.
_PLAIN = [first + place for first in (5, 20, 50, 200, 500, 2000, 5000) for place in range(4)]
#: The steps after these, in which tools analyse operators again; left out like the warm-up.
_AGAIN = frozenset(number + 1 for place, number in enumerate(_PLAIN) if place % 4 == 3)
_MEASURED = frozenset(number for place, number in enumerate(_PLAIN) if place % 4 > 1)
