"""What a compiled graph cannot have, so that the frame runs eagerly; what operators return.

Owns the reasons that depend on one operator. Those of a whole graph or callable are in `graph` and
`callbacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_core import OpContext
from amanda_driver_torch._autograd.nodes import tensors_in
from amanda_driver_torch._compiled.execution import OpPlan
from amanda_driver_torch._operators.bindings import IN_PLACE_METADATA
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._operators.signature import BoundCall, outputs_of
from amanda_driver_torch._torch.dynamo import tree_leaves

__all__ = ["CannotWeave", "check", "does_nothing", "likes"]


class CannotWeave(Exception):
    """A reason why a graph cannot be instrumented, so that its frame must run eagerly."""


def does_nothing(operator: Operator, func: Any, bound: BoundCall, outputs: Sequence[Any]) -> bool:
    """Return True if an operator returns its input, such as `contiguous`."""
    if bound.signature.mutated or bound.out is not None:
        return False
    if "dropout" in operator.op_type:
        # Dynamo shows a copy where the operator itself, without dropping, makes none.
        args, kwargs = bound.given
        outputs = outputs_of(func(*args, **kwargs))
    inputs = {id(tensor) for tensor in tensors_in(bound.values)}
    return any(id(tensor) in inputs for tensor in tensors_in(outputs))


def likes(outputs: Sequence[Any]) -> list[Any]:
    if not all(isinstance(value, torch.Tensor) for value in outputs):
        return []
    if any(not all(type(n) is int for n in value.shape) for value in outputs):
        return []
    return [(tuple(value.shape), value.dtype, value.device) for value in outputs]


def check(
    context: OpContext, plan: OpPlan, bound: BoundCall, outputs: Sequence[Any], has_gradient: bool
) -> None:
    """Raise `CannotWeave` for what a compiled graph cannot have."""
    where = context.name

    def refuse(what: str) -> None:
        raise CannotWeave(f"{what} ({where})")

    gradients = has_gradient and (plan.arriving or plan.leaving)
    replaced = has_gradient and plan.arriving.replacement
    if plan.changes:
        _check_written(context, plan, bound, outputs, refuse)
    if replaced and not all(isinstance(output, torch.Tensor) for output in outputs):
        refuse("a tool replaces the backward of an operator with outputs that are no tensors")
    if gradients and any(map(_is_nested, (*bound.values, *outputs))):
        refuse("a tool requests gradients of an operator with lists of lists of tensors")
    values = tree_leaves((bound.values, outputs))
    if plan.on_host and any(isinstance(v, torch.SymBool) for v in values):
        refuse("a routine on the host gets a symbolic truth value")
    if plan.on_host and any(isinstance(v, torch.Tensor) and v.is_nested for v in values):
        refuse("a routine on the host gets a nested tensor")
    passed = [value for one in plan.steps_on_host for value in one.action.kwargs.values()]
    if any(value is context for value in passed) and any(
        weight.varies for weight in context.weights.values()
    ):
        refuse("a routine on the host asks for a weight that may be another one each time")
    step = plan.before.replacement
    if step is not None and not step.action.staged and not plan.outputs:
        refuse("a replacement on the host has outputs of unknown shape")
    differentiated = [
        *((one, bound.values) for one in plan.before.steps if one.action.autodiff),
        *((one, outputs) for one in plan.after.steps if one.action.autodiff),
        *([] if step is None else [(step, bound.values)]),
    ]
    for one, given in differentiated if torch.is_grad_enabled() else ():
        if one.action.staged or one.action.observe:
            continue
        if has_gradient and not likes(tensors_in((*bound.values, *outputs))):
            refuse("a routine on the host is differentiated, and shapes are dynamic")
        chosen = one.action.positions
        got = given if chosen is None else [given[place] for place in chosen if place < len(given)]
        if not any(tensor.requires_grad for tensor in tensors_in(got)):
            refuse(
                "a routine on the host is differentiated, and gets no value that requires a "
                "gradient: those of parameters of its own would be lost"
            )


def _check_written(
    context: OpContext,
    plan: OpPlan,
    bound: BoundCall,
    outputs: Sequence[Any],
    refuse: Callable[[str], None],
) -> None:
    signature = bound.signature
    if bound.out is not None:
        refuse("a tool edits an operator with `out=`, or requests its gradients")
    others = signature.mutated - {0}
    for step in plan.before.steps:
        positions = step.action.positions
        if not step.action.observe and not others.isdisjoint(
            range(len(bound.values)) if positions is None else positions
        ):
            refuse("a tool edits a tensor that an operator writes beside its result")
    if not signature.in_place:
        return
    written = bound.values[0]
    replaced = plan.before.replacement or plan.arriving.replacement
    if (
        context.op_type in IN_PLACE_METADATA
        or not isinstance(written, torch.Tensor)
        or (len(outputs) != 1 or outputs[0] is not written if outputs or replaced else False)
    ):
        refuse("a tool edits an operator that changes the shape of an argument, or writes a list")


def _is_nested(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(one, (list, tuple)) and tensors_in(one) for one in value
    )
