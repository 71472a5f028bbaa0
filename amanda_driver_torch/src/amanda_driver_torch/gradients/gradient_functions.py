"""Functions of gradients: the steps of a plan at the gradients that routines request together.

Owns which positions are requested together, and the functions, which hooks in a graph hold: these
hold no tensor, and neither a plan nor the backward program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from amanda_core.driver_kit import Plan, Step
from amanda_driver_torch.gradients.backward import Backward
from amanda_driver_torch.gradients.edits import edited_gradient
from amanda_driver_torch.gradients.node_hooks import Token
from amanda_driver_torch.gradients.nodes import Slot, taken
from amanda_driver_torch.threads.modes import changes_of

__all__ = ["GradientFunction", "concerns", "gradient_function", "requested_together"]

#: Maps gradients; accepts the results of its first steps' routines, too.
GradientFunction = Callable[..., Sequence[Any]]


def gradient_function(
    backward: Backward,
    token: Token,
    group: frozenset[int],
    slots: Sequence[Slot],
    values: Sequence[Any],
) -> GradientFunction:
    """Return a function that maps the gradients at `slots` through the steps of a kept plan.

    Args:
        backward: The backward program.
        token: The key of the plan.
        group: The positions at `slots`.
        slots: The places of the gradients.
        values: The values at all positions, for the lengths of lists.
    """
    lifetime, held, count = backward.lifetime, weakref.ref(backward), len(values)
    lengths = {p: len(values[p]) for p, index in slots if index is not None}

    def function(grads: Sequence[Any], done: tuple[Any, ...] = ()) -> Sequence[Any]:
        backward = held()
        if not lifetime.active() or backward is None:
            return grads
        plan = backward.plan_of(token)
        assert plan is not None
        positions: list[Any] = [None] * count
        for position, length in lengths.items():
            positions[position] = [None] * length
        for (position, index), grad in zip(slots, grads, strict=True):
            if index is None:
                positions[position] = grad
            else:
                positions[position][index] = grad
        # All gradients that a step needs are in one group.
        steps = [s for s in plan.steps if concerns(s, group)]
        for i, step in enumerate(steps):
            if backward.still_applied(step):
                _run_step(step, positions, done[i : i + 1])
        return taken(positions, slots)

    return function


def _run_step(step: Step, positions: list[Any], done: tuple[Any, ...]) -> None:
    for position, new in changes_of(step, positions, done):
        old = positions[position]
        if isinstance(old, list):
            new = [edited_gradient(one, other, step) for one, other in zip(old, new, strict=True)]
        else:
            new = edited_gradient(old, new, step)
        positions[position] = new


def concerns(step: Step, group: frozenset[int] | set[int]) -> bool:
    """Return True if a step needs the gradient of any position in `group`."""
    positions = step.action.positions
    return bool(group) if positions is None else not group.isdisjoint(positions)


def requested_together(plan: Plan, slots: Iterable[Slot]) -> list[frozenset[int]]:
    """Group the positions of `slots` that any step requests together, directly or indirectly."""
    present = {position for position, _ in slots}
    groups: list[set[int]] = []
    if len(plan.steps) == 1 and plan.steps[0].action.positions is None:
        return [frozenset(present)] if present else []
    for step in plan.steps:
        positions = step.action.positions
        new = set(present) if positions is None else present.intersection(positions)
        if not new:
            continue
        joined = [group for group in groups if group & new]
        groups = [group for group in groups if not group & new]
        groups.append(new.union(*joined))
    return [frozenset(group) for group in groups]
