"""`Latency`: time each operator, forward and backward, on the CPU and on a device.

Decides what is timed when. Nested and overlapping times are computed in `intervals`, devices are
timed in `device_events` and `kernels`, and the result is in `result`. One large class: nearly every
method changes the state of the step that is timed.
"""

from __future__ import annotations

import statistics
import threading
import time
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from amanda_core import OpContext
from amanda_core.driver_kit.marks import LIMIT, PER_MARK, Marks
from amanda_core.engine.action import Routine
from amanda_core.engine.selection import Selection, select
from amanda_core.engine.session import COMPILED_CALL, COMPILED_KERNEL
from amanda_tools.kit.operators.tool import OperatorTool
from amanda_tools.kit.output.chrome import Span
from amanda_tools.kit.output.rendering import format_count
from amanda_tools.kit.tensors.values import tensors_in
from amanda_tools.latency.accounts import Account, Op, Thread
from amanda_tools.latency.device_events import CudaEvents, EventPairs, Events, Pair
from amanda_tools.latency.driver_time import (
    AGAIN,
    MEASURED,
    PLAIN,
    charge_driver,
    subtract_inside,
    without_driver,
)
from amanda_tools.latency.intervals import Between, Interval, Overlapping
from amanda_tools.latency.kernels import Kernel, Kernels
from amanda_tools.latency.result import LatencyResult
from amanda_tools.latency.runs import PER_EXECUTION, Run, Runs
from amanda_tools.latency.times import MOST_WARM_UP, StepTime, TimedOp, warm_up

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Latency"]


class Latency(OperatorTool[Op]):
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
        self._first: list[Account] = []
        #: Those of the steps in which tools analyse again, and of what was between them.
        self._later: list[Account] = []
        #: The steps without the profiler.
        self._plain: list[StepTime] = []
        self.where(None)
        self._steps: list[StepTime] = []
        self._step_begin = 0
        #: Time of the tool's last work; 0 before the first operator, which starts step 0.
        self._last = 0
        #: The execution that started last, and when the tool was called for it, until that counts.
        self._entered: tuple[int, Interval[Op]] | None = None
        self._threads: dict[int, Thread] = {}
        #: When operators were reached whose times are only recorded: twice the number of the
        #: operator, and 1 more if it was its end.
        self._marks = Marks(self._take_marks, self.now)
        self._has_marks = False
        #: What identifies a series of marks -> its numbers, and the runs of the program.
        self._runs: dict[Hashable, tuple[Sequence[int], Runs[Op]]] = {}
        #: Numbers of the marks of one call, as bytes -> whether these are nested operators; None
        #: until the second time.
        self._nested: dict[bytes, bool | None] = {}
        self._graph: Overlapping[Op] = Overlapping()
        self._between = Between()
        self._by_number: list[Op] = []
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
        timed = ~select(steps=PLAIN)
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

    def enter(self, *values: Any, op: Op) -> None:
        """Start the time of one execution."""
        arrived = self.now()
        with self._lock:
            thread = self._threads.get(threading.get_ident()) or self._new_thread()
            if self._entered is not None or self._has_marks:
                self._settle(is_counted=True)
            self._begin(op, arrived)
            marks = _NO_MARKS
            if op.device is not None or self._kernels is not None:
                marks = self._begin_marks(op, thread.stack.innermost)
            interval = thread.stack.enter(op, arrived, marks)
            self._entered = arrived, interval
            # Last, so that as little of the tool as possible is in the operator's time.
            interval.start = interval.end = self.now()

    def leave(self, *values: Any, op: Op) -> None:
        """End the time of one execution."""
        if values:
            op.tensors.wait(values)
        end = self.now()
        with self._lock:
            thread = self._threads.get(threading.get_ident()) or self._new_thread()
            if self._entered is not None or self._has_marks:
                self._settle(is_counted=True)
            stack = self._finish(op, thread, end).stack
            done = self.now()
            self._spent(end, done)
            if stack.open:
                stack.spent(done - end)
            else:
                self._begin_between(op, done)

    def _begin(self, op: Op, at: int) -> None:
        """End the time between operators, as one begins."""
        if not self._last:
            self._step_begin = at
        if self._between.since is not None:
            self._between.end(at, op.module)

    def _finish(self, op: Op, thread: Thread, end: int) -> Thread:
        """Count an execution that ends; return the thread on which it began."""
        if self._between.since is not None:
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
        return thread

    def _begin_between(self, op: Op, at: int) -> None:
        """Begin the time between operators, unless one is running elsewhere."""
        if not self._graph.running and (len(self._threads) == 1 or not self._is_running):
            self._between.begin(at, op.module)

    def wait(self, op: Op, context: OpContext) -> None:
        """Count one execution of a collective: the time that the program spent in it."""
        end = self.now()
        with self._lock:
            thread = self._threads.get(threading.get_ident()) or self._new_thread()
            self._settle(is_counted=True)
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

    def _routines(self, op: Op) -> list[tuple[Routine, dict[str, Any]]]:
        """Return the routines before and after an operator, and their arguments."""
        # What does more than read a clock, or stands in for it, is called.
        does_more = op.device is not None or self._kernels is not None or op.results is None
        is_recorded = op.tensors.records_marks and self.now is time.perf_counter_ns
        if not op.is_graph and (does_more or not is_recorded):
            return [(self.enter, {"op": op}), (self.leave, {"op": op})]
        self._has_marks = True
        return [(self._marks.note, {"number": 2 * op.number + end}) for end in (0, 1)]

    def _take_marks(self, is_counted: bool = False) -> None:
        """Count the executions since the last call whose times were only recorded."""
        with self._lock:
            begin = last = self.now()
            if marks := self._marks.take_array():
                if not self._last:
                    self._clock.add(marks[1], marks[1])
                if not self._take_nested(marks):
                    self._take_each(marks)
                last = self._last
            for numbers, times, ident in self._marks.take_runs():
                self._take_run(id(numbers), numbers, times, ident)
                last = self._last
            if last != begin and not is_counted:
                done = self.now()
                if self._between.end(begin, ""):
                    self._between.begin(done, "")
                self._spent(begin, done)

    def _take_each(self, marks: array[int]) -> None:
        """Count executions one by one."""
        for mark, at, ident in zip(*[iter(marks)] * PER_MARK, strict=True):
            op, is_end = self._by_number[mark >> 1], mark & 1
            if not is_end:
                self._begin(op, at)
            if op.is_graph and is_end:
                self._between.end(at, op.module)
                interval = self._graph.leave(op, at)
                if interval is not None:
                    self._count(interval, self._threads.get(ident) or self._new_thread(ident))
                if not self._is_running:
                    self._between.begin(at, op.module)
            elif op.is_graph:
                self._graph.enter(op, at)
            else:
                thread = self._threads.get(ident) or self._new_thread(ident)
                if not is_end:
                    thread.stack.enter(op, at, _NO_MARKS)
                elif not self._finish(op, thread, at).stack.open:
                    self._begin_between(op, at)
            self._last = at

    def _take_nested(self, marks: array[int]) -> bool:
        """Count executions as a run of a program, if the same ones came before in this order.

        Returns:
            False unless all are on one thread, each ends, and no other one is running.
        """
        numbers, threads = marks[::PER_MARK], marks[2::PER_MARK]
        if self._is_running or threads.count(threads[0]) != len(threads):
            return False
        key = numbers.tobytes()
        if key not in self._nested:
            if len(self._nested) >= _PROGRAMS:
                self._attribute()
                self._nested.clear()
                self._runs.clear()
            self._nested[key] = None
        elif self._nested[key] is None:
            operators = Runs(numbers, self._by_number.__getitem__).operators
            is_graph = any(one.what.is_graph for one in operators)
            self._nested[key] = not is_graph and 2 * len(operators) == len(numbers)
        if self._nested[key]:
            self._take_run(key, numbers, marks[1::PER_MARK], threads[0])
        return bool(self._nested[key])

    def _take_run(
        self, key: Hashable, numbers: Sequence[int], times: Sequence[int], ident: int
    ) -> None:
        """Count a run of a program in its step and thread, and keep its times."""
        # Inside of another operator, the time between those of the program belongs to that one.
        module = None if self._is_running else self._between.module
        known = self._runs.get((key, module))
        if known is None:
            runs = Runs(numbers, self._by_number.__getitem__, attrgetter("module"), module)
            known = self._runs[key, module] = numbers, runs
        runs, thread = known[1], self._threads.get(ident) or self._new_thread(ident)
        if not self._last:
            self._step_begin = times[0]
            self._clock.add(times[0], times[0])
        if runs.outermost:
            busy = runs.busy(times)
            self._between.end(times[runs.outermost[0].start], runs.outermost[0].what.module)
            thread.stack.spent(busy)  # An operator around it, such as one of autograd.
            thread.time.self += busy
            if self._steps:
                self._steps[-1].ops += busy
            self._last = times[runs.outermost[-1].end]
            if module is not None:
                self._between.begin(self._last, runs.module)
        thread.time.calls += len(runs.operators)
        if self._steps:
            self._steps[-1].calls += len(runs.operators)
        track = self._tracks.setdefault(thread.time.name, len(self._tracks))
        runs.add(Run(times, track, self._step))
        if len(runs) >= LIMIT:
            self._attribute()

    def _attribute(self) -> None:
        """Count the operators inside the runs of programs."""
        added: list[tuple[int, Runs[Op], Run]] = []
        for _, runs in self._runs.values():
            accounts, gaps, new = runs.take()
            for op, totals, own in accounts:
                op.facts.add_all(totals, own)
                op.samples.extend(totals)
            for path, time_between in gaps:
                self._between.add(path, time_between)
            added += [(run.times[0], runs, run) for run in new]
        for _, runs, run in sorted(added, key=itemgetter(0)):
            room = PER_EXECUTION * self.limit - len(self._executions)
            if room > 0:
                self._executions.extend(runs.executions(run)[:room])
            self._left_out += max(0, len(runs.operators) - room // PER_EXECUTION)

    def begin_step(self, number: int) -> None:
        """Record the start of a step."""
        with self._lock:
            self._settle()
            if number in AGAIN and self.warmup != 0 and self._is_past_first:
                # The accounts so far stay apart from those of this step.
                self._close(-number, self._later)
            self._step_begin = self.now()
            self._steps.append(StepTime(number))
            self._between.drop()
            if self._last and number not in PLAIN:
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
                elif number in PLAIN:
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
            again = AGAIN if self.warmup != 0 else frozenset()
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
            measured = [step.wall for step in self._plain if step.number in MEASURED]
            plain = round(statistics.median(measured)) if measured else None
            if plain is not None:
                if len(threads) == 1 and not total:  # Those of several threads may overlap.
                    subtract_inside(ops, steps, threads[0], max(measured))
                charge_driver(steps, plain)
                between = without_driver(between, steps)
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
        elif step.number in AGAIN and self.warmup != 0:
            self._close(step.number, self._later)

    def _close(self, key: int, accounts: list[Account]) -> None:
        """Begin new accounts, and keep those so far by a key."""
        self._attribute()
        for op in self._ops.values():
            op.close(key)
        for thread in self._threads.values():
            thread.close(key)
        accounts.append(Account(key, self._between.times, self._graph.busy, self._graph.total))
        self._between.forget()
        self._graph.busy = self._graph.total = 0

    def _op_of(self, context: OpContext, values: Sequence[Any]) -> Op:
        op = self.account_of(context, lambda: self._new_op(context))
        op.device = op.facts.device = self._device_of(op, values)
        return op

    def _new_op(self, context: OpContext) -> Op:
        self._by_number.append(Op(context, len(self._by_number)))
        return self._by_number[-1]

    def _device_of(self, op: Op, values: Sequence[Any]) -> str | None:
        if op.is_torch:
            for _, tensor in tensors_in(op.tensors, values):
                device = op.tensors.device(tensor)
                if device.partition(":")[0] in self.asynchronous:
                    return device
        return None

    def _new_thread(self, ident: int | None = None) -> Thread:
        ident = threading.get_ident() if ident is None else ident
        known = (thread.name for thread in threading.enumerate() if thread.ident == ident)
        # A framework's own thread may never have run Python.
        thread = self._threads[ident] = Thread(next(known, f"thread {len(self._threads) + 1}"))
        return thread

    def _begin_marks(self, op: Op, outer: Interval[Op] | None) -> _Marks:
        pair = inside = None
        if op.device is not None:
            self._origins.setdefault(op.device, self.now())
            pair = self._pairs.begin(op.device, outer.marks.pair if outer is not None else None)
        if self._kernels is not None and op.is_torch:
            inside = self._kernels.begin(op.number)
        return _Marks(pair, inside)

    def _end_marks(self, interval: Interval[Op]) -> None:
        if interval.marks is None:
            return
        pair, inside = interval.marks
        if pair is not None:
            self._pairs.end(pair, partial(self._on_device, interval.what, pair, self._step))
        if inside is not None and self._kernels is not None:
            self._kernels.end(inside)

    def _on_device(self, op: Op, pair: Pair, step: int, start: int, total: int, own: int) -> None:
        facts = op.closed[step][0] if step in op.closed else op.facts
        facts.device_total += total
        facts.device_self += own
        start += self._origins[pair.device]
        self._keep(op, pair.stream, start, start + total, step)

    def _count(self, interval: Interval[Op], thread: Thread) -> None:
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
        if len(self._executions) < PER_EXECUTION * self.limit:
            track = self._tracks.setdefault(of_thread.name, len(self._tracks))
            self._executions.extend((op.number, track, interval.start, interval.end, number))
        else:
            self._left_out += 1

    def _keep(self, op: Op, track: str, start: int, end: int, step: int) -> None:
        if len(self._executions) < PER_EXECUTION * self.limit:
            number = self._tracks.setdefault(track, len(self._tracks))
            self._executions.extend((op.number, number, start, end, step))
        else:
            self._left_out += 1

    def _spans(self) -> list[Span]:
        tracks, found = list(self._tracks), []
        for number, track, start, end, step in zip(
            *[iter(self._executions)] * PER_EXECUTION, strict=True
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

    def _give_up(self, thread: Thread) -> None:
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

    def _settle(self, is_counted: bool = False) -> None:
        """Count the time that the tool took to start the last execution, and what was recorded.

        Args:
            is_counted: Whether the caller counts the time that this takes, as part of its own.
        """
        if self._entered is not None:
            arrived, interval = self._entered
            self._entered = None
            if interval.parent is not None:
                interval.parent.inner += interval.start - arrived
            self._spent(arrived, interval.start)
        if self._has_marks:
            self._take_marks(is_counted)

    def _spent(self, start: int, end: int) -> None:
        clock = self._clock
        if not clock.spent:
            clock.add(start, end)
        else:
            clock.spent += end - start
            clock.last = end
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


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {path: one.get(path, 0) + other.get(path, 0) for path in (*one, *other)}


def _in_kernels(context: OpContext) -> bool:
    forward = context.forward if context.is_backward() else context
    return forward is not None and bool(forward.get("in_kernels"))


class _Marks(NamedTuple):
    """Measurements that start with an execution: a pair of device events, a range in a profile."""

    pair: Pair | None
    inside: Any


#: Notes about the option `uncompiled`.
_UNCOMPILED = "jitted functions ran operator by operator: what XLA fuses was not fused"
_NO_EFFECT = "uncompiled has no effect on frameworks other than JAX and PyTorch"

_NO_MARKS = _Marks(None, None)
#: How many series of marks are remembered.
_PROGRAMS = 16
