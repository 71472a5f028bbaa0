"""Groups of steps that share a node, and the values of an op that such a node takes."""

from __future__ import annotations

from collections.abc import Sequence

from amanda_core.driver_kit import Marks, Step
from amanda_driver_tf.graphs.body import Node
from amanda_driver_tf.insertion.step_functions import Layout
from amanda_driver_tf.operators.signature import signature_of

__all__ = ["grouped_steps", "references_of", "selected_indices", "selected_layout"]


def grouped_steps(steps: Sequence[Step]) -> list[list[Step]]:
    """Group neighbouring steps that can share a node."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and _kind(step) is not None and _kind(step) == _kind(groups[-1][-1]):
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _kind(step: Step) -> bool | None:
    """Return True for an observing step, False for an edit; None if it needs a node of its own."""
    action = step.action
    alone = action.staged or action.autodiff or Marks.of(action.routine) is not None
    return None if alone else action.observe


def selected_indices(
    steps: Sequence[Step], layout: Layout, count: int, all_of_them: bool
) -> list[int]:
    """Return the indices of the flat tensors that the node of `steps` takes."""
    if all_of_them or any(step.action.positions is None for step in steps):
        return list(range(count))
    positions = {p for step in steps for p in step.action.positions or ()}
    chosen: list[int] = []
    start = 0
    for position, length in enumerate(layout.lengths):
        stop = start + (1 if length is None else length)
        if position in positions:
            chosen.extend(range(start, stop))
        start = stop
    return chosen


def references_of(node: Node) -> set[int]:
    """Return the indices of the inputs that a node takes as references rather than values."""
    signature = signature_of(node.op_type)
    if signature is None:
        return set(range(len(node.inputs)))
    lengths = signature.lengths(node.op.get_attr)
    of_argument = [
        argument.is_ref
        for argument, length in zip(signature.arguments, lengths, strict=True)
        for _ in range(1 if length is None else length)
    ]
    return {index for index, is_reference in enumerate(of_argument) if is_reference}


def selected_layout(layout: Layout, selected: Sequence[int]) -> Layout:
    """Return a layout in which only the selected tensors are present, at unchanged positions."""
    chosen = set(selected)
    return Layout(layout.lengths, [index in chosen for index in range(layout.total)])
