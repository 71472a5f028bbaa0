"""Runs the plans of backward ops on the gradients before and after a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda_core import OpContext, Plan
from amanda_core.errors import EditError, RoutineResultError
from amanda_driver_torch._autograd.edits import check_gradient, edited_gradient
from amanda_driver_torch._thread.modes import changes_of
from amanda_driver_torch._torch.internals import current_node

__all__ = ["fold", "replaced"]


def fold(plan: Plan, grads: Sequence[Any], done: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the gradients after the steps of `plan`, or None if they are unchanged.

    Args:
        plan: The plan.
        grads: The gradients.
        done: Results of the first steps' routines, if they have been called already.
    """
    if not plan.steps:
        return None
    values = list(grads)
    changed = False
    for i, step in enumerate(plan.steps):
        for position, new in changes_of(step, values, done[i : i + 1]):
            values[position] = edited_gradient(values[position], new, step)
            changed = True
    return tuple(values) if changed else None


def replaced(
    plan: Plan, grads: Sequence[Any], results: Sequence[Any], context: OpContext
) -> list[Any]:
    """Return a replacement's results, which are used instead of the node's own."""
    assert plan.replacement is not None
    given = plan.replacement.replace(list(grads))
    values = list(given) if isinstance(given, (tuple, list)) else [given]
    if len(values) != len(results):
        raise RoutineResultError(
            f"A replacement returned {len(values)} gradients, but this backward op has "
            f"{len(results)} results",
            where=plan.replacement.where,
            fix="Return one value for each, None for a missing gradient",
        )
    receivers = current_node().next_functions
    for index, (old, new) in enumerate(zip(results, values, strict=True)):
        if old is None and new is not None:
            if receivers[index][0] is not None:
                raise EditError(
                    f"Result {index} of {context.name} is None in this backward pass; "
                    "PyTorch does not let a hook supply one",
                    where=plan.replacement.where,
                    fix="Use replace_backward_op on the forward context",
                )
            values[index] = None  # No node receives this result.
        else:
            check_gradient(old, new, plan.replacement)
    return values
