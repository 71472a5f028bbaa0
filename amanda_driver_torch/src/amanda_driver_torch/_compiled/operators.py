"""One operator of a compiled graph: the steps of its plans, traced around it.

Owns what runs at an operator while a backend traces or runs the woven graph. `graph` analyses it
before.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amanda_core import Plan, Step
from amanda_core.errors import RoutineResultError
from amanda_driver_torch._autograd.edits import check_gradient, check_tensor
from amanda_driver_torch._compiled.functions import pass_straight, replaced_backward, tapped
from amanda_driver_torch._compiled.host import Host, Like
from amanda_driver_torch._entry.transparent_wrappers import run_transparently
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._operators.signature import BoundCall, bind, outputs_of, restructure
from amanda_driver_torch._thread.modes import call_routine
from amanda_driver_torch._thread.state import STATE
from amanda_driver_torch._torch.dynamo import tree_map

__all__ = ["Lifted", "OpPlan", "OperatorMode", "Woven", "run_operator"]


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
    """

    host: Host
    before: Plan
    after: Plan
    arriving: Plan
    leaving: Plan
    outputs: Sequence[Like] = ()

    def __bool__(self) -> bool:
        return any((self.before, self.after, self.arriving, self.leaving))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans."""
        return self.before, self.after, self.arriving, self.leaving


class OperatorMode(TorchFunctionMode):
    """Passes the operators that a node of a graph runs to `operate`, in order."""

    _operators: dict[Any, Operator | None] = {}  # noqa: RUF012

    def operate(
        self, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operator."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Any,
        types_: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if type(func) is types.FunctionType:
            if STATE.transparent and STATE.transparent[-1] is func:
                return func(*args, **kwargs)
            return run_transparently(self, func, args, kwargs)
        operator = self.operator(func)
        if operator is None:
            return func(*args, **kwargs)
        return self.operate(operator, func, args, kwargs)

    @classmethod
    def operator(cls, func: Any) -> Operator | None:
        """Return the operator that a function is; None if it is none."""
        try:
            return cls._operators[func]
        except KeyError:
            found = cls._operators[func] = Operator.of(func)
            return found


class Lifted(TorchFunctionMode):
    """Puts values of the graph in the place of tensors that a routine refers to itself.

    Attributes:
        found: id of such a tensor -> the tensor and its value in the graph.

    Args:
        lift: Returns the value of the graph for a tensor, or None for one that is part of it.
    """

    def __init__(self, lift: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._lift = lift

    def __torch_function__(
        self,
        func: Any,
        types_: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(self._lifted, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _lifted(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        new = self._lift(value)
        return value if new is None else new


@dataclass(eq=False)
class Woven:
    """The plans of a node of a graph, as the function that takes its place.

    Attributes:
        target: The function of the node.
        plans: Those of the operators that it runs, in order; None for one without.
        lifted: ids of the tensors that its routines refer to, in the order of the arguments.
    """

    target: Callable[..., Any]
    plans: list[OpPlan | None]
    is_operator: bool
    lifted: list[torch.Tensor] = field(default_factory=list)

    def function(self) -> Callable[..., Any]:
        """Return it as a function: FX prints the name of what a node calls."""
        # Compiled code may outlive the tools.
        held = weakref.ref(self)

        def woven(args: tuple[Any, ...], kwargs: dict[str, Any], lifted: list[Any]) -> Any:
            this = held()
            assert this is not None
            given = {id(tensor): value for tensor, value in zip(this.lifted, lifted, strict=True)}
            lift = Lifted(lambda tensor: given.get(id(tensor))) if given else None
            return this.run(args, kwargs, lift)

        woven.__name__ = f"woven_{getattr(self.target, '__name__', 'call')}"
        return woven

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: Lifted | None) -> Any:
        """Run the node with the steps of its plans."""
        if self.is_operator:
            (plan,) = self.plans
            assert plan is not None
            return run_operator(plan, self.target, tuple(args), dict(kwargs), lifted)
        mode = _Planned(self.plans, lifted)
        with mode:
            return self.target(*args, **kwargs)


class _Planned(OperatorMode):
    def __init__(self, plans: Iterable[OpPlan | None], lifted: Lifted | None) -> None:
        super().__init__()
        self._plans, self._lifted = iter(plans), lifted

    def operate(
        self, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plan = next(self._plans)
        if plan is None:
            return func(*args, **kwargs)
        return run_operator(plan, func, args, kwargs, self._lifted)


def run_operator(
    plan: OpPlan,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lifted: Lifted | None,
) -> Any:
    """Run one operator with the steps of its plans."""
    return _Execution(plan, func, bind(func, args, kwargs), lifted).run()


class _Execution:
    def __init__(self, plan: OpPlan, func: Any, bound: BoundCall, lifted: Lifted | None) -> None:
        self.plan, self.func, self.lifted = plan, func, lifted
        self.bound: BoundCall | None = bound
        self.template: Any = None

    def run(self) -> Any:
        plan = self.plan
        assert self.bound is not None
        values = self.fold(plan.before, list(self.bound.values))
        if plan.arriving.replacement is not None and self.sources(values):
            outputs = self.with_replaced_backward(plan.arriving.replacement, values)
        else:
            if plan.leaving:
                values = self.tap(values, lambda found: self.fold_gradients(plan.leaving, found))
            outputs = self.compute(values)
            if plan.arriving:
                outputs = self.tap(outputs, lambda found: self.fold_gradients(plan.arriving, found))
        outputs = self.fold(plan.after, outputs)
        # Nodes refer to this object, and may not to a tensor: no collector sees such a cycle.
        template, self.template, self.bound = self.template, None, None
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
            found = self.plan.host.replace(step, values, self.plan.outputs)
            self.template = found[0] if len(found) == 1 else tuple(found)
        return outputs_of(self.template)

    def staged(self, function: Any, values: Any, *, autodiff: bool) -> Any:
        if self.lifted is None:
            return call_routine(function, values, autodiff)
        with self.lifted:
            return call_routine(function, values, autodiff)

    def fold(self, plan: Plan, values: list[Any]) -> list[Any]:
        """Apply the steps before or after the operator."""
        for step in plan.steps:
            if step.action.staged:
                changes = self.staged(step, values, autodiff=step.action.autodiff)
            elif step.action.observe or step.action.positions == ():
                self.plan.host.observe(step, values)
                continue
            else:
                changes = self.plan.host.edit(step, values)
            for position, new in changes:
                values[position] = _edited(values[position], new, step)
        return values

    # Gradients.

    def sources(self, values: Sequence[Any]) -> list[int]:
        """Return the positions of tensors that get a gradient."""
        if not torch.is_grad_enabled():
            return []
        return [
            position
            for position, value in enumerate(values)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]

    def tap(self, values: list[Any], change: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Let a function change the gradients of values."""
        positions = self.sources(values)
        if not positions:
            return values

        count = len(values)

        def changed(gradients: list[Any]) -> list[Any]:
            found: list[Any] = [None] * count
            for position, gradient in zip(positions, gradients, strict=True):
                found[position] = gradient
            found = change(found)
            return [found[position] for position in positions]

        new = tapped(changed, [values[position] for position in positions])
        values = list(values)
        for position, value in zip(positions, new, strict=True):
            values[position] = value
        return values

    def fold_gradients(self, plan: Plan, gradients: list[Any]) -> list[Any]:
        """Apply steps to gradients."""
        for step in plan.steps:
            if step.action.staged:
                changes = self.staged(step, gradients, autodiff=False)
            elif all(g is None for g in _selected(step, gradients)):
                step(gradients)  # Raises the error of a wrong position.
                continue
            elif step.action.observe or step.action.positions == ():
                self.plan.host.observe(step, gradients)
                continue
            else:
                changes = self.plan.host.edit(step, gradients)
            for position, new in changes:
                check_gradient(gradients[position], new, step.where)
                gradients[position] = new
        return gradients

    def with_replaced_backward(self, step: Step, values: list[Any]) -> list[Any]:
        plan, positions, count = self.plan, self.sources(values), len(values)
        likes = [(tuple(t.shape), t.dtype, t.device) for t in map(values.__getitem__, positions)]

        def compute(tensors: Sequence[Any]) -> list[Any]:
            given = list(values)
            for position, tensor in zip(positions, tensors, strict=True):
                given[position] = tensor
            return self.compute(given)

        def backward(gradients: list[Any]) -> list[Any]:
            gradients = self.fold_gradients(Plan(plan.arriving.steps), gradients)
            if step.action.staged:
                given = self.staged(step.replace, gradients, autodiff=False)
                found = list(given) if isinstance(given, (tuple, list)) else [given]
            else:
                found = plan.host.replace(step, gradients, likes)
            if len(found) == len(positions):
                new = dict(zip(positions, found, strict=True))
            elif len(found) > positions[-1]:
                new = {position: found[position] for position in positions}
            else:
                raise RoutineResultError(
                    f"A replacement of a backward op returned {len(found)} gradients",
                    where=step.where,
                    fix="Return one gradient for each input up to the last differentiable one",
                )
            whole = [new.get(position) for position in range(count)]
            whole = self.fold_gradients(plan.leaving, whole)
            return [whole[position] for position in positions]

        return list(replaced_backward(compute, backward, [values[p] for p in positions]))


def _selected(step: Step, values: Sequence[Any]) -> list[Any]:
    positions = step.action.positions
    if positions is None:
        return list(values)
    return [values[position] for position in positions if position < len(values)]


def _edited(old: Any, new: Any, step: Step) -> Any:
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return type(old)(
            o if n is o else _edited(o, n, step) for o, n in zip(old, new, strict=True)
        )
    if not isinstance(old, torch.Tensor) or step.action.autodiff:
        return new
    if old.requires_grad and torch.is_grad_enabled():
        check_tensor(old, new, step)
    return pass_straight(old, new) if isinstance(new, torch.Tensor) else new
