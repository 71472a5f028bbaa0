"""The nodes of a compiled graph, as the functions that a backend traces in their place.

Owns how the operators that a node runs are found, and which values of the graph stand for tensors
of the program around. `execution` runs one operator.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amanda_driver_torch.compiled.execution import Lifted, OperatorRun, OpPlan
from amanda_driver_torch.compiled.staged_trace import StagedTrace
from amanda_driver_torch.interception.transparent_wrappers import (
    call_transparently,
    run_transparently,
)
from amanda_driver_torch.operators.operator import Args, Kwargs, Operator
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.internals import TensorBase

__all__ = ["OperatorMode", "Woven"]


class OperatorMode(TorchFunctionMode):
    """Passes the operators that a node of a graph runs to `operate`, in order."""

    def operate(self, operator: Operator, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run one operator, and return its result.

        Args:
            operator: The operator.
            func: The function of torch that the program calls for it.
            args: Its positional arguments.
            kwargs: Its arguments by name.
        """
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types_: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if type(func) is types.FunctionType:
            if not STATE.transparent or STATE.transparent[-1] is not func:
                run = run_transparently, self, func, args, kwargs
                return call_transparently(func.__globals__, *run)
            # A method in C names the one in Python that overrides it.
            func = getattr(TensorBase, func.__name__, func)
        operator = self.operator(func)
        if operator is None:
            return func(*args, **kwargs)
        return self.operate(operator, func, args, kwargs)

    @staticmethod
    @functools.cache
    def operator(func: Any) -> Operator | None:
        """Return the operator that a function is; None if it is not an operator."""
        return Operator.of(func)


@dataclass(eq=False)
class Woven:
    """The plans of one node of a graph. `function` returns what takes the place of the node.

    A routine of a plan runs on the host, or is staged: then the backend compiles it with the graph.

    Attributes:
        target: The function that the node calls.
        plans: The plan of each operator that `target` runs, in order; None for an operator without
            routines. Exactly one plan if `target` is an operator.
        names: Types of these operators, in the same order; empty if `target` is an operator.
        is_operator: Whether `target` is an operator. Otherwise it is a function that runs some.
        place: Name of the node.
        lifted: The tensors that staged routines refer to themselves. The graph passes their values
            to `function` in this order.
        trace: The calls that staged routines make, to compare those of several places.
    """

    target: Callable[..., Any]
    plans: list[OpPlan | None]
    names: list[str]
    is_operator: bool
    place: str = ""
    lifted: list[torch.Tensor] = field(default_factory=list)
    trace: StagedTrace = field(default_factory=StagedTrace)

    @property
    def on_host(self) -> bool:
        """True if a routine runs on the host."""
        return any(plan.on_host for plan in self.plans if plan)

    @property
    def stages_gradients(self) -> bool:
        """True if a staged routine gets gradients."""
        plans = (p for plan in self.plans if plan for p in plan.gradients)
        steps = (step for plan in plans for step in (*plan.steps, plan.replacement))
        return any(step is not None and step.action.staged for step in steps)

    def function(self) -> Callable[..., Any]:
        """Return the function that the node calls instead of `target`, with a name for FX to print.

        It gets the arguments of the node as a tuple and a dictionary, the values of `lifted`, and
        the number of the row as a tensor if places share the code. It holds this object weakly.
        """
        # Compiled code may outlive the tools.
        held = weakref.ref(self)

        def woven(args: Args, kwargs: Kwargs, lifted: list[Any], row: Any = None) -> Any:
            this = held()
            assert this is not None
            given = {id(tensor): value for tensor, value in zip(this.lifted, lifted, strict=True)}
            lift = Lifted(lambda tensor: given.get(id(tensor))) if given else None
            return this.run(args, kwargs, lift, row)

        woven.__name__ = f"woven_{getattr(self.target, '__name__', 'call')}"
        return woven

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        lifted: Lifted | None,
        row: torch.Tensor | None = None,
    ) -> Any:
        """Run the node with the steps of its plans, or those that a row has in their place.

        Args:
            args: The positional arguments of the node.
            kwargs: Its arguments by name.
            lifted: Puts values of the graph in the place of `Woven.lifted`; None if that is empty.
            row: The number of the row that runs; None if places do not share the code.

        Raises:
            RuntimeError: `target` runs other operators than when it was analysed.
        """
        if self.is_operator:
            (plan,) = self.plans
            assert plan is not None
            return OperatorRun(plan, self.target, tuple(args), dict(kwargs), lifted, row).run()
        mode = _Planned(zip(self.names, self.plans, strict=True), lifted, row)
        with mode:
            return self.target(*args, **kwargs)


class _Planned(OperatorMode):
    def __init__(
        self,
        plans: Iterable[tuple[str, OpPlan | None]],
        lifted: Lifted | None,
        row: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self._plans, self._lifted, self._row = iter(plans), lifted, row

    def operate(self, operator: Operator, func: Any, args: Args, kwargs: Kwargs) -> Any:
        name, plan = next(self._plans, ("", None))
        if name != operator.op_type:
            raise RuntimeError(f"{operator.op_type} runs, which was not analysed there")
        if plan is None:
            return func(*args, **kwargs)
        return OperatorRun(plan, func, args, kwargs, self._lifted, self._row).run()
