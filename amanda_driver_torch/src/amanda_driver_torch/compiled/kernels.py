"""The kernels of compiled graphs, as operators for tools that see compiled calls.

A call of a compiled graph is the operator ``compiled_call``, and each call of a kernel in it a
``compiled_kernel``; the backward program of the graph has backward operators of these types. Their
routines get no values. Marks (`amanda_core.driver_kit.Marks`) become reads of a clock in the
generated code, which hands all times on when it ends.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import fx

from amanda_core.driver_kit import COMPILED_CALL, COMPILED_KERNEL, Marks, OpContext, Plan, Step
from amanda_core.interface import IPoint, Site
from amanda_driver_torch.compiled.choice import AnalysisFailed, CannotWeave
from amanda_driver_torch.compiled.host import Host
from amanda_driver_torch.gradients.nodes import BackwardOp
from amanda_driver_torch.threads.modes import call_routine
from amanda_driver_torch.torch_internals.inductor import Half, KernelCall, compile_in_halves

__all__ = ["compile_with_kernels"]

_POINTS = (
    (IPoint.BEFORE_FORWARD, IPoint.AFTER_FORWARD),
    (IPoint.BEFORE_BACKWARD, IPoint.AFTER_BACKWARD),
)


def compile_with_kernels(
    host: Host,
    backend: Any,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    nodes: dict[str, list[OpContext]],
    name: str,
    made: Counter[Any],
    gaps: dict[str, str],
) -> Callable[..., Any]:
    """Compile a graph by Inductor, and let tools analyse its call and its kernels.

    Args:
        host: Has the session.
        backend: The backend.
        graph: The graph.
        inputs: Its inputs.
        nodes: Name of a node -> contexts of its operators.
        name: Name of the compiled code.
        made: What identifies a graph -> how many were compiled.
        gaps: For the coverage: what is not seen, and why.

    Raises:
        CannotWeave: A tool changes a value at a kernel.
        AnalysisFailed: The analysis of a tool failed.
    """
    compiled, halves = compile_in_halves(backend, graph, inputs)
    operators = [context for contexts in nodes.values() for context in contexts]
    if operators:
        first = operators[0]
        key = COMPILED_CALL, name, first.get_op_id()
        shown = _Graph(host, nodes, operators, (*key, made[key]), name)
        made[key] += 1
        try:
            for half in sorted(halves, key=lambda one: one.is_backward):
                why_not = half.find_calls()
                shown.show(half)
                if why_not:
                    gaps[f"kernels of {name}"] = why_not
                    host.session.note_inside(name, f"kernels: {why_not}")
        except (CannotWeave, AnalysisFailed):
            raise
        except Exception as error:
            raise CannotWeave(
                f"its kernels are not found in the generated code: {error}"
            ) from error
    return compiled


class _Graph:
    def __init__(
        self,
        host: Host,
        nodes: dict[str, list[OpContext]],
        operators: Sequence[OpContext],
        key: tuple[Any, ...],
        name: str,
    ) -> None:
        self._host, self._nodes, self._operators, self._key = host, nodes, operators, key
        *_, number = key
        self._name = name if not number else f"{name} ({number + 1})"
        self._forward: OpContext | None = None

    def show(self, half: Half) -> None:
        """Let tools analyse one half, and write what they insert into it."""
        whole, plans = self._open(COMPILED_CALL, self._key, self._name, self._operators, half)
        found = [(whole, plans)]
        self._forward = self._forward or whole
        for place, call in enumerate(half.calls):
            found.append(self._kernel(half, place, call))
        recorder = _Recorder(self._host)
        before, after = zip(*(plans for _, plans in found), strict=True)
        # Those of kernels lie inside those of the call.
        around = [plan for pair in zip(before[1:], after[1:], strict=True) for plan in pair]
        recorder.write([before[0], *around, after[0]])
        if recorder.is_empty:
            return
        calls = recorder.calls
        self._host.held.append(recorder)
        half.replace(
            [calls[0], *calls[1:-1:2]],
            [calls[-1], *calls[2:-1:2]],
            time.perf_counter_ns,
            recorder.function(),
        )

    def _kernel(
        self, half: Half, place: int, call: KernelCall
    ) -> tuple[OpContext, tuple[Plan, Plan]]:
        # In the order of the program.
        held = [node for node in self._nodes if node in call.nodes]
        operators = [context for node in held for context in self._nodes[node]]
        key = (COMPILED_KERNEL, *self._key, place, call.name)
        label = f"{place}/{call.name}"
        return self._open(COMPILED_KERNEL, key, label, operators, half)

    def _open(
        self,
        op_type: str,
        key: tuple[Any, ...],
        label: str,
        operators: Sequence[OpContext],
        half: Half,
    ) -> tuple[OpContext, tuple[Plan, Plan]]:
        session, is_backward = self._host.session, half.is_backward
        around = operators or self._operators
        path = _common([one.module_path for one in around])
        suffix = f"/{COMPILED_CALL}" if op_type == COMPILED_CALL else ""
        name = f"{path}/{label}{suffix}" if path else f"{label}{suffix}"
        sources = {one.source for one in around}
        site = Site(
            key,
            op_type,
            around[0].namespace,
            name + (":backward" if is_backward else ""),
            path,
            sources.pop() if len(sources) == 1 else None,
            around[0].zone,
        )
        forward = self._forward if is_backward else None
        raw: Any = BackwardOp(op_type) if is_backward else label
        context = session.open(site, raw, [], forward=forward, backward=is_backward)
        if op_type == COMPILED_KERNEL:
            context["operators"] = tuple(operators)
        if is_backward:
            context.execution["grad_outputs"] = []
        try:
            before = self._plan(context, _POINTS[is_backward][0])
            if is_backward:
                context.execution["grad_inputs"] = []
            else:
                context.fill(outputs=[])
            return context, (before, self._plan(context, _POINTS[is_backward][1]))
        finally:
            context.release()

    def _plan(self, context: OpContext, point: IPoint) -> Plan:
        session = self._host.session
        if point in _POINTS[True] and not session.wants_backward:
            return Plan()
        try:
            found: Plan = call_routine(context.trigger_callback, point)
        except Exception as error:
            raise AnalysisFailed(error) from error
        if found.replacement is not None or not all(step.action.observe for step in found.steps):
            raise CannotWeave(f"a tool edits at {context.name}, which it can only observe")
        return found


class _Recorder:
    """Marks and routines at the places of one half; the times of marks come at its end.

    Attributes:
        host: Has the session.
        calls: For each place the function to call, or None where only the clock is read.
        notes: Functions that get the times of one run.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.calls: list[Callable[[], object] | None] = []
        #: Marks -> their numbers, by place.
        self._marks: dict[Marks, dict[int, int]] = {}
        self.notes: list[Callable[[Sequence[int]], None]] = []

    @property
    def is_empty(self) -> bool:
        """True if nothing was inserted."""
        return not self._marks and not any(self.calls)

    def write(self, plans: Sequence[Plan]) -> None:
        """Prepare the plans of the places, in their order."""
        for place, plan in enumerate(plans):
            steps = [step for step in plan.steps if not self._takes(step, place)]
            ends = place == len(plans) - 1 or (place > 0 and place % 2 == 0)
            self.calls.append(self._calling(steps, ends) if steps else None)
        for marks, places in self._marks.items():
            self.notes.append(_picking(marks.series(tuple(places.values())), list(places)))

    def function(self) -> Callable[[tuple[int, ...]], None]:
        """Return what gets the times. It does not keep the recorder: code may outlive tools."""
        held = weakref.ref(self)

        def note(times: tuple[int, ...]) -> None:
            recorder = held()
            if recorder is not None and recorder.host.runs():
                for one in recorder.notes:
                    one(times)

        return note

    def _takes(self, step: Step, place: int) -> bool:
        """Return True if a step is a mark whose time may come later."""
        marks = Marks.of(step.action.routine)
        if marks is None or marks.clock is not time.perf_counter_ns:
            return False
        places = self._marks.setdefault(marks, {})
        if place in places:
            return False
        places[place] = step.action.kwargs["number"]
        return True

    def _calling(self, steps: Sequence[Step], ends: bool) -> Callable[[], int]:
        held = weakref.ref(self)

        def call() -> int:
            ended = time.perf_counter_ns()
            recorder = held()
            if recorder is not None and recorder.host.runs():
                for step in steps:
                    call_routine(step, [])
            return ended if ends else time.perf_counter_ns()

        return call


def _picking(
    note: Callable[[Sequence[int]], None], places: list[int]
) -> Callable[[Sequence[int]], None]:
    """Return a function that passes on the times of some places."""
    if len(places) == 1:
        return lambda times: note((times[places[0]],))
    pick = itemgetter(*places)
    return lambda times: note(pick(times))


def _common(paths: Sequence[str]) -> str:
    """Return the path of the innermost module that contains all paths."""
    common = paths[0].split(".")
    for path in paths:
        parts = path.split(".")
        while common != parts[: len(common)]:
            common.pop()
    return ".".join(common)
