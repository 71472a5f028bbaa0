"""The execution of one operator of a compiled graph: the steps of its plans, traced around it.

Owns the order of steps, the operator and the taps of gradients, and what an operator writes. A
backend traces it; `operators` is what calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amanda_core.driver_kit import Plan, Step
from amanda_core.interface import RoutineResultError
from amanda_driver_torch.communication import complete, is_unfinished
from amanda_driver_torch.compiled.backward_operators import BackwardOperators
from amanda_driver_torch.compiled.functions import pass_straight, replaced_backward, tapped
from amanda_driver_torch.compiled.host import Host, Like, like_of
from amanda_driver_torch.compiled.staged_trace import StagedTrace
from amanda_driver_torch.gradients.edits import check_gradient, check_tensor, check_written
from amanda_driver_torch.gradients.nodes import Slot, differentiable, placed, taken
from amanda_driver_torch.gradients.operator_call import made_by
from amanda_driver_torch.operators.operator import Args, Kwargs
from amanda_driver_torch.operators.signature import BoundCall, bind, outputs_of, restructure
from amanda_driver_torch.threads.modes import call_routine
from amanda_driver_torch.torch_internals.dynamo import tree_map
from amanda_driver_torch.torch_internals.internals import next_sequence

__all__ = ["Lifted", "OpPlan", "OperatorRun", "edits_only"]


class Lifted(TorchFunctionMode):
    """Puts values of the graph in the place of tensors that a routine refers to itself.

    Args:
        lift: Returns the value of the graph for a tensor, or None for one that is part of it.
        trace: Notes what staged routines compute.
    """

    def __init__(
        self, lift: Callable[[torch.Tensor], Any], trace: StagedTrace | None = None
    ) -> None:
        super().__init__()
        self._lift, self._trace = lift, trace

    def end(self) -> None:
        """Put nothing in their place any more: nodes refer to this object."""
        self._lift, self._trace = lambda tensor: None, None

    def run(self, function: Any, values: Any, autodiff: bool) -> Any:
        """Run a staged routine, and return what it returns as values of the graph."""
        self._note("given", values)
        with self:
            found = call_routine(function, values, autodiff)
        self._note("returned", found)
        return self.lifted(found)

    def _note(self, *values: Any) -> None:
        if self._trace is not None:
            self._trace.note(*values)

    def __torch_function__(
        self, func: Any, types_: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        self._note(func, args, kwargs)
        args, kwargs = self.lifted((args, kwargs or {}))
        found = func(*args, **kwargs)
        self._note(found)
        return found

    def lifted(self, values: Any) -> Any:
        """Return the same values, with those of the graph in the place of such tensors."""
        return tree_map(self._lifted, values)

    def _lifted(self, value: Any) -> Any:
        new = self._lift(value) if isinstance(value, torch.Tensor) else None
        return value if new is None else new


@dataclass
class OpPlan:
    """The plans of one operator of a graph.

    Attributes:
        host: Calls routines on the host.
        before: Before the operator, with its replacement.
        after: After it.
        arriving: For the gradients of its outputs, with the replacement of its backward.
        leaving: For the gradients of its inputs.
        outputs: What its outputs are like; empty if that depends on the inputs.
        backward: Its backward operators, with their plans; None if nothing is planned there.
    """

    host: Host
    before: Plan
    after: Plan
    arriving: Plan
    leaving: Plan
    outputs: Sequence[Like] = ()
    backward: BackwardOperators | None = None

    def __bool__(self) -> bool:
        return any((self.before, self.after, self.arriving, self.leaving, self.backward))

    @property
    def changes(self) -> bool:
        """True if more than routines before and after the operator that only look are planned."""
        return bool(self.before.edits or self.after.edits or self.arriving or self.leaving)

    @property
    def steps_on_host(self) -> list[Step]:
        """Those with routines on the host."""
        steps = (step for plan in self.plans for step in (*plan.steps, plan.replacement))
        return [step for step in steps if step is not None and not step.action.staged]

    @property
    def on_host(self) -> bool:
        """True if a routine runs on the host."""
        return bool(self.steps_on_host)

    @property
    def edits_on_host(self) -> bool:
        """True if a routine on the host may edit inputs or results of the operator."""
        steps = (*self.before.steps, self.before.replacement, *self.after.steps)
        actions = (step.action for step in steps if step is not None)
        return any(not (a.staged or a.observe or a.positions == ()) for a in actions)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans."""
        return self.before, self.after, *self.gradients

    @property
    def gradients(self) -> tuple[Plan, ...]:
        """Those for gradients."""
        return self.arriving, self.leaving, *(self.backward or ())


class OperatorRun:
    """One operator with the steps of its plans.

    Args:
        plan: Its plans.
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        lifted: Replaces the tensors that staged routines captured by values of the graph.
        row: Number of the row whose routines on the host run, in code that several places share.
    """

    def __init__(
        self,
        plan: OpPlan,
        func: Any,
        args: Args,
        kwargs: Kwargs,
        lifted: Lifted | None,
        row: torch.Tensor | None,
    ) -> None:
        self.plan, self.func, self.lifted = plan, func, lifted
        self.host = plan.host if row is None else plan.host.in_row(row)
        bound = bind(func, args, kwargs)
        self.bound: BoundCall | None = bound
        self.in_place = bound.signature.in_place
        self.template: Any = None
        #: The tensor that the operator writes, if it runs on a copy for the sake of the steps.
        self.written: torch.Tensor | None = None

    def run(self) -> Any:
        """Run it, and return its outputs."""
        plan = self.plan
        assert self.bound is not None
        values = list(self.bound.values)
        if self.in_place and plan.changes:
            self.written = values[0]
            values[0] = values[0].clone()
        values = self.fold(plan.before, values)
        replaced = plan.arriving.replacement if self.sources(values) else None
        if replaced is not None:
            outputs = self.with_replaced_backward(replaced, values)
        else:
            if plan.leaving:
                values = self.tap(values, lambda found: self.fold_gradients(plan.leaving, found))
            bound, start = self.bound, next_sequence()
            outputs = self.compute(values)
            if plan.backward is not None:
                made = made_by(bound, values, outputs)
                plan.backward.hook(made, start, self.fold_raw)
            if plan.arriving:
                outputs = self.tap(outputs, lambda found: self.fold_gradients(plan.arriving, found))
        outputs = self.fold(plan.after, outputs)
        if self.written is not None:
            self.written.copy_(outputs[0])
            outputs = [self.written]
        # Nodes refer to this object, and may not to a tensor: no collector sees such a cycle.
        template, self.template, self.bound, self.written = self.template, None, None, None
        return None if template is None else restructure(template, outputs)

    def compute(self, values: list[Any]) -> list[Any]:
        """Run the operator or its replacement, and return the outputs."""
        step = self.plan.before.replacement
        if step is None:
            assert self.bound is not None
            args, kwargs = self.bound.call_args(values)
            self.bound = None
            self.template = self.func(*args, **kwargs)
        elif step.action.staged:
            self.template = self.staged(step.replace, values, autodiff=True)
        else:
            found = self.host.replace(step, values, self.plan.outputs, autodiff=True)
            self.template = found[0] if len(found) == 1 else tuple(found)
        if self.template is None and self.in_place:
            return [values[0]]
        return outputs_of(self.template)

    def staged(self, function: Any, values: Any, *, autodiff: bool) -> Any:
        """Run a staged routine."""
        if self.lifted is None:
            return call_routine(function, values, autodiff)
        return self.lifted.run(function, values, autodiff)

    def changes(self, step: Step, values: list[Any], autodiff: bool) -> list[tuple[int, Any]]:
        """Run a step, or let the graph run it on the host; return the new values."""
        if step.action.staged:
            found: list[tuple[int, Any]] = self.staged(step, values, autodiff=autodiff)
            return found
        if step.action.observe or step.action.positions == ():
            self.host.observe(step, values)
            return []
        return self.host.edit(step, values, autodiff)

    def fold(self, plan: Plan, values: list[Any]) -> list[Any]:
        """Apply the steps before or after the operator."""
        if is_unfinished(self.func, plan.steps):
            values = complete(values)
        for step in plan.steps:
            changes = self.changes(step, values, step.action.autodiff)
            counts = _references(changes)
            for (position, new), count in zip(changes, counts, strict=True):
                if position == 0 and self.written is not None:
                    check_written(values[position], new, step)
                values[position] = _edited(values[position], new, step, count <= _ALONE)
        return values

    # Gradients.

    def sources(self, values: Sequence[Any]) -> dict[Slot, torch.Tensor]:
        """Return the tensors that get a gradient, by their places."""
        return differentiable(values) if torch.is_grad_enabled() else {}

    def tap(self, values: list[Any], change: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Let a function change the gradients of values."""
        sources = self.sources(values)
        if not sources:
            return values
        slots, empty = list(sources), _empty(values)

        def changed(gradients: list[Any]) -> list[Any]:
            return taken(change(placed(empty, slots, gradients)), slots)

        return placed(values, slots, tapped(changed, list(sources.values())))

    def fold_raw(self, plan: Plan, gradients: list[Any]) -> list[Any]:
        """Apply steps to gradients of a backward operator."""
        return self.fold_gradients(plan, gradients, is_raw=True)

    def fold_gradients(
        self, plan: Plan, gradients: list[Any], *, is_raw: bool = False
    ) -> list[Any]:
        """Apply steps to gradients.

        Args:
            plan: The steps.
            gradients: The gradients.
            is_raw: Whether they are those of a backward operator. There, a routine that selects
                none runs, too.
        """
        for step in plan.steps:
            if not step.action.staged and all(g is None for g in _selected(step, gradients)):
                if step.action.positions != ():
                    step(gradients)  # Raises the error of a wrong position.
                elif is_raw:
                    self.host.observe(step, gradients)
                continue
            for position, new in self.changes(step, gradients, autodiff=False):
                old = gradients[position]
                is_list = isinstance(old, list)
                for o, n in zip(old, new, strict=True) if is_list else [(old, new)]:
                    check_gradient(o, n, step)
                gradients[position] = list(new) if is_list else new
        return gradients

    def with_replaced_backward(self, step: Step, values: list[Any]) -> list[Any]:
        """Run the operator, differentiated by a replacement; return the outputs."""
        sources = self.sources(values)
        slots, empty = list(sources), _empty(values)
        likes = list(map(like_of, sources.values()))

        def compute(tensors: Sequence[Any]) -> list[Any]:
            return self.compute(placed(values, slots, tensors))

        def backward(gradients: list[Any]) -> list[Any]:
            plan = self.plan
            gradients = self.fold_gradients(Plan(plan.arriving.steps), gradients)
            if step.action.staged:
                given = self.staged(step.replace, gradients, autodiff=False)
                found = list(given) if isinstance(given, (tuple, list)) else [given]
            else:
                found = self.host.replace(step, gradients, likes)
            last = slots[-1][0]
            are_alone = all(index is None for _, index in slots)
            if len(found) > last and not (are_alone and len(found) == len(slots)):
                found = taken(found, slots)
            elif len(found) != len(slots):
                raise RoutineResultError(
                    f"A replacement of a backward op returned {len(found)} gradients",
                    where=step.where,
                    fix="Return one gradient for each input up to the last differentiable one",
                )
            return taken(self.fold_gradients(plan.leaving, placed(empty, slots, found)), slots)

        return list(replaced_backward(compute, backward, list(sources.values())))


def _empty(values: Sequence[Any]) -> list[Any]:
    """Return a place for the gradient of each value."""
    return [[None] * len(v) if isinstance(v, (list, tuple)) else None for v in values]


def _selected(step: Step, values: Sequence[Any]) -> list[Any]:
    """Return the values that a step selects, and those in lists of them."""
    positions = step.action.positions
    chosen = range(len(values)) if positions is None else positions
    found = [values[position] for position in chosen if position < len(values)]
    return [one for value in found for one in (value if isinstance(value, list) else [value])]


def _references(changes: Iterable[tuple[int, Any]]) -> list[int]:
    """Return the number of references to each new value."""
    return [sys.getrefcount(new) for _, new in changes]


#: The number of references to a value that only its change refers to.
(_ALONE,) = _references([(0, object())])


def _edited(old: Any, new: Any, step: Step, is_alone: bool = False) -> Any:
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return type(old)(
            o if n is o else _edited(o, n, step) for o, n in zip(old, new, strict=True)
        )
    if not isinstance(old, torch.Tensor) or step.action.autodiff:
        return new
    if old.requires_grad and torch.is_grad_enabled():
        check_tensor(old, new, step)
    return pass_straight(old, new, is_alone) if isinstance(new, torch.Tensor) else new


def edits_only(plan: Plan) -> Plan:
    """Return a plan without the steps that only look."""
    return Plan([one for one in plan.steps if not one.action.observe], plan.replacement)
