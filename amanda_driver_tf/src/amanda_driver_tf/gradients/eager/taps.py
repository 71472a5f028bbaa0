"""Taps: identities on the tapes, which run the aligned gradient routines of a replaced op.

For an op that runs itself, `taped` handles the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import Plan
from amanda_driver_tf.gradients.eager.edits import call_step, edited_gradient, is_trainable
from amanda_driver_tf.identity.program import EagerProgram
from amanda_driver_tf.tensorflow_internals.modules import gen_array_ops, record
from amanda_driver_tf.tensorflow_internals.tapes import call_unrecorded, executes_eagerly
from amanda_driver_tf.threads import call_quietly

__all__ = ["tap_inputs", "tap_outputs"]

# (position, index in a list of tensors or None)
_Slot = tuple[int, int | None]


def tap_inputs(program: EagerProgram, plan: Plan, values: Sequence[Any]) -> list[Any]:
    """Return identities of a replacement's inputs, whose gradients `plan` then edits."""
    return _tapped(program, plan, values)


def tap_outputs(program: EagerProgram, plan: Plan, outputs: Sequence[Any]) -> list[Any]:
    """Return identities of a replacement's outputs, whose gradients `plan` then edits."""
    return _tapped(program, plan, outputs)


def _tapped(program: EagerProgram, plan: Plan, values: Sequence[Any]) -> list[Any]:
    new = [list(value) if isinstance(value, list) else value for value in values]
    slots: list[_Slot] = []
    for position, value in enumerate(new):
        indexes = range(len(value)) if isinstance(value, list) else [None]
        slots += ((position, index) for index in indexes)
    slots = [slot for slot in slots if is_trainable(_at(new, slot))]
    for group in _groups(plan, {position for position, _ in slots}):
        chosen = [slot for slot in slots if slot[0] in group]
        old = [_at(new, slot) for slot in chosen]
        fresh = call_quietly(call_unrecorded, _copies, old)
        lengths = {p: len(new[p]) for p, index in chosen if index is not None}
        function = _function(program, plan, group, chosen, len(new), lengths)
        record.record_operation("AmandaTap", fresh, old, function, _straight)
        for (position, index), tensor in zip(chosen, fresh, strict=True):
            if index is None:
                new[position] = tensor
            else:
                new[position][index] = tensor
    return new


def _copies(values: Sequence[Any]) -> list[Any]:
    return [gen_array_ops.identity(tensor) for tensor in values]


def _at(values: Sequence[Any], slot: _Slot) -> Any:
    position, index = slot
    return values[position] if index is None else values[position][index]


def _straight(*tangents: Any) -> list[Any]:
    return list(tangents)


def _function(
    program: EagerProgram,
    plan: Plan,
    group: frozenset[int],
    slots: Sequence[_Slot],
    count: int,
    lengths: dict[int, int],
) -> Callable[..., list[Any]]:
    """Return a function that maps the gradients at `slots` through the steps of `group`."""
    applied = program.applied()

    def function(*grads: Any) -> list[Any]:
        if not program.gradients_wanted() or not executes_eagerly():
            return list(grads)
        applied.miss()
        values: list[Any] = [[None] * lengths[p] if p in lengths else None for p in range(count)]
        for (position, index), grad in zip(slots, grads, strict=True):
            if index is None:
                values[position] = grad
            else:
                values[position][index] = grad
        for step in plan.steps:
            positions = step.action.positions
            if positions is not None and group.isdisjoint(positions):
                continue
            for position, new in call_step(step, values):
                values[position] = edited_gradient(values[position], new, step)
        return [_at(values, slot) for slot in slots]

    return function


def _groups(plan: Plan, positions: set[int]) -> list[frozenset[int]]:
    """Group the positions that any step requests together into disjoint sets."""
    groups: list[set[int]] = []
    for step in plan.steps:
        wanted = step.action.positions
        merged = set(positions if wanted is None else positions.intersection(wanted))
        if not merged:
            continue
        apart = [group for group in groups if group.isdisjoint(merged)]
        for group in groups:
            if not group.isdisjoint(merged):
                merged |= group
        groups = [*apart, merged]
    return [frozenset(group) for group in groups]
