"""Replaces an op's whole backward (the aligned view).

Owns how the op runs detached from the graph, and what a replacement's gradients mean. The node
itself is in `driver_nodes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from amanda_core.driver_kit import Plan, Step
from amanda_core.interface import RoutineResultError, UnsupportedError
from amanda_driver_torch.gradients.backward import Backward
from amanda_driver_torch.gradients.driver_nodes import run_replaced
from amanda_driver_torch.gradients.edits import check_gradient_shape, refuse_nested
from amanda_driver_torch.gradients.nodes import differentiable, placed, taken
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.operators.signature import outputs_of, restructure
from amanda_driver_torch.threads.modes import call_routine

__all__ = ["run_with_replaced_backward"]


def run_with_replaced_backward(
    call: OperatorCall, backward_program: Backward, replacement: Step
) -> Any:
    """Run an op whose whole backward is the routine of `replacement`."""
    slots = differentiable(call.values)
    if not slots:
        return call.call_original(call.values)
    chosen = list(slots)
    for tensor in slots.values():
        refuse_nested(tensor, replacement)
    returned: list[Any] = []
    where = replacement.where
    # Weakly, like everything that a node of the graph refers to.
    held, lifetime = weakref.ref(backward_program), backward_program.lifetime
    token = backward_program.keep(Plan(replacement=replacement))
    last = chosen[-1][0]
    lengths = {p: len(call.values[p]) for p, index in chosen if index is not None}
    shapes = [slots[slot].shape for slot in chosen]
    mutated = call.mutated

    def forward(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Sequence[Any]]:
        values = placed(call.values, chosen, tensors)
        result = call.call_original(values)
        call.original.drop()  # The call itself has no gradient; the new node has.
        returned.append(result)
        outputs = [o for o in call.outputs_of(result) if isinstance(o, torch.Tensor)]
        written = [values[p] for p in mutated if isinstance(values[p], torch.Tensor)]
        dirty = [o for o in outputs if any(o is w for w in written)]
        fresh = {id(d) for d in dirty}
        # With a returned input, or a view of one, autograd would refuse later in-place operations.
        return [o if id(o) in fresh else o.detach() for o in outputs], dirty

    def backward(grads: Sequence[Any]) -> Sequence[Any]:
        program = held()
        plan = program.plan_of(token) if program is not None else None
        step = plan.replacement if plan is not None else None
        if (
            program is None
            or step is None
            or not program.still_applied(step)
            or not lifetime.active()
        ):
            raise UnsupportedError(
                "The backward of this op was replaced by a routine of a tool that is no longer "
                "applied",
                where=where,
                fix="Call backward inside `apply`",
            )
        # If this pass is differentiated, the replacement is differentiated as written.
        given = call_routine(step.replace, list(grads), autodiff=True)
        if not isinstance(given, (tuple, list)):
            if len(chosen) != 1:
                raise _wrong("one gradient", f"{len(chosen)} inputs are differentiable", where)
            given = [None] * last + ([given] if chosen[0][1] is None else [[given]])
        if len(given) == 1 and len(chosen) == 1 and last:
            given = [None] * last + list(given)
        if len(given) <= last:
            raise _wrong(f"{len(given)} gradients", f"input {last} is differentiable", where)
        for position, length in lengths.items():
            if given[position] is not None and len(given[position]) != length:
                raise RoutineResultError(
                    f"A replacement of a backward op returned {len(given[position])} gradients for "
                    f"input {position}, which is a list of {length} tensors",
                    where=where,
                    fix="Return a list with a gradient for each tensor, or None",
                )
        grads = taken(given, chosen)
        for grad, shape in zip(grads, shapes, strict=True):
            check_gradient_shape(grad, shape, step)
        return grads

    tensors = iter(run_replaced(forward, [slots[slot] for slot in chosen], backward))
    result = returned[0]
    if result is None:
        return None
    return restructure(
        result, [next(tensors) if isinstance(o, torch.Tensor) else o for o in outputs_of(result)]
    )


def _wrong(returned: str, but: str, where: str) -> RoutineResultError:
    return RoutineResultError(
        f"A replacement of a backward op returned {returned}, but {but}",
        where=where,
        fix="Return one gradient for each input up to the last differentiable one",
    )
