"""The call of an operator, made once where it enters Python, and what has become of it so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_core.driver_kit import OpContext, OriginalCall, Plan, Session
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.operators.operator import Args, Kwargs, Operator, Original
from amanda_driver_torch.operators.signature import BoundCall, bind, outputs_of
from amanda_driver_torch.torch_internals.tensor_attributes import base_of, requires_grad

__all__ = ["OperatorCall", "made_by"]


class OperatorCall:
    """One call of an operator.

    Args:
        execution: What executes it; has the session.
        record: The op's record.
        operator: The operator.
        call: Runs the original.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Attributes:
        session: The session.
        original: Runs the original.
        call: Runs the original, or returns what it has returned already.
        bound: The call, with the values given by the program.
        values: The values that the op will run on.
        mutated: Positions that the op writes.
        start: Sequence number of autograd nodes before the op ran.
        made_count: Number of nodes made since then, including the driver's.
        called: Whether the original was called before this execution began.
        tapped: Whether hooks for gradients of inputs were set in that call.
        saved: For each tensor that the op saved, whether it lies in what the op writes; None if
            that is not known.
        context: The op's context.
        before: Its plan before forward, once it was analysed; likewise the other plans.
        after: Its plan after forward.
        arriving: Its plan for the gradients of its outputs.
        leaving: Its plan for the gradients of its inputs.
        returned: The op's return value, once it has run.
    """

    session: Session
    context: OpContext
    before: Plan
    after: Plan
    arriving: Plan
    leaving: Plan
    returned: Any
    bound: BoundCall
    values: list[Any]
    mutated: frozenset[int]
    start = made_count = 0
    called = tapped = False
    saved: list[bool] | None = None

    def __init__(
        self,
        execution: Any,
        record: OpRecord,
        operator: Operator,
        call: Original,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        self.execution, self.record, self.operator = execution, record, operator
        self.args, self.kwargs = args, kwargs
        self.session = session = execution.session
        self.original = OriginalCall(call, session.failures.policy == "skip")
        self.call: Callable[..., Any] = self.original

    def bind(self) -> None:
        """Bind the arguments to the positions of the op."""
        self.bound = bind(self.operator.func, self.args, self.kwargs)
        self.values, self.mutated = list(self.bound.values), self.bound.signature.mutated

    def made(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors whose nodes this call made: its outputs and the arguments it wrote."""
        return made_by(self.bound, self.bound.values, outputs)

    @property
    def writes_whole(self) -> bool:
        """True if it writes its first argument in place, and that is not a view."""
        written = self.values[0] if self.bound.signature.in_place else None
        return type(written) is torch.Tensor and base_of(written) is None

    def call_original(self, values: Sequence[Any]) -> Any:
        """Run the original on values by position."""
        args, kwargs = self.bound.call_args(values)
        return self.call(*args, **kwargs)

    def outputs_of(self, returned: Any) -> list[Any]:
        """Return the outputs in what the original returned."""
        if returned is None and self.bound.signature.in_place:
            return [self.values[0]]
        return outputs_of(returned)


def made_by(bound: BoundCall, values: Sequence[Any], outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors whose nodes a call made: its outputs and the arguments it wrote.

    Args:
        bound: The call.
        values: The values that it ran on.
        outputs: Its outputs.
    """
    written = tensors_in(values[position] for position in bound.signature.mutated)
    # Writing a view makes a node of its base. The view's own node is made when it is next read.
    tensors = []
    for tensor in written:
        base = base_of(tensor)
        tensors.append(tensor if base is None else base)
    # A returned input has no node of this op, except that unknown signatures may write it.
    old = {id(t) for t in (tensors_in(values) if bound.bound else written)}
    tensors += (t for t in tensors_in(outputs) if id(t) not in old)
    return [t for t in tensors if requires_grad(t)]
