"""The computation of new nodes: steps of plans as functions over flat lists of tensors.

Owns the conversion between grouped values and flat tensors, and the errors for results that do not
fit a graph, in which dtypes are fixed. It does not know nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from amanda_core.driver_kit import Step
from amanda_core.interface import AmandaError, RoutineResultError, UnsupportedError
from amanda_driver_tf.insertion.jacobians import lost_gradient_error
from amanda_driver_tf.insertion.nodes import Flat
from amanda_driver_tf.insertion.shape_checks import check_same_rows, check_same_shape, check_shape
from amanda_driver_tf.operators.signature import flattened
from amanda_driver_tf.tensorflow_internals.modules import dtypes

__all__ = [
    "Layout",
    "backward_replacement_function",
    "fold",
    "keep_gradient_shapes",
    "keep_shapes",
    "observing_function",
    "refuse_changes",
    "replacement_function",
]


class Layout:
    """The order in which positions are laid out in a flat list of tensors.

    Args:
        lengths: For each position its number of tensors; None for a single tensor.
        present: Which of the flat tensors exist; a gradient may be missing.
        slices: Positions whose tensors are the components of `tf.IndexedSlices`: values, indices
            and, if it is known, the dense shape.
    """

    def __init__(
        self,
        lengths: Sequence[int | None],
        present: Sequence[bool] | None = None,
        slices: frozenset[int] = frozenset(),
    ) -> None:
        self.lengths = tuple(lengths)
        self.total = sum(1 if length is None else length for length in self.lengths)
        self.present = tuple(present) if present is not None else (True,) * self.total
        self.slices = slices
        self._is_flat = not slices and all(length is None for length in self.lengths)

    def group(self, flat: Sequence[Any]) -> list[Any]:
        """Return the values by position; missing ones are None."""
        tensors = iter(flat)
        full = [next(tensors) if there else None for there in self.present]
        if self._is_flat:
            return full
        result: list[Any] = []
        start = 0
        for position, length in enumerate(self.lengths):
            stop = start + (1 if length is None else length)
            if position in self.slices:
                parts = full[start:stop]
                result.append(None if parts[0] is None else tf.IndexedSlices(*parts))
            else:
                result.append(full[start] if length is None else full[start:stop])
            start = stop
        return result

    def flatten(self, positions: Sequence[Any], step: Step, old: Sequence[Any] = ()) -> list[Any]:
        """Return the flat tensors of grouped values, the inverse of `group`.

        Args:
            positions: The values by position.
            step: The step that returned them.
            old: The flat tensors before the step, for components of slices that it did not change.
        """
        spread: list[Any] = []
        before = self.group(old) if old else [None] * len(self.lengths)
        for position, value in enumerate(positions):
            length = self.lengths[position]
            if position not in self.slices:
                if length is not None and _length(value) != length:
                    raise RoutineResultError(
                        f"A routine returned {_length(value)} tensors for a list of {length}",
                        where=step.where,
                        fix="Return as many tensors as there are",
                    )
                spread.append(value)
            elif value is None:
                spread.append([None] * (length or 0))
            elif isinstance(value, tf.IndexedSlices):
                parts = [value.values, value.indices, value.dense_shape]
                was = before[position]
                if was is not None and value is not was:
                    parts = [
                        check_same_rows(value, was.indices, step),
                        was.indices,
                        was.dense_shape,
                    ]
                spread.append(parts[:length])
            else:
                raise UnsupportedError(
                    "A gradient that is tf.IndexedSlices was replaced by a dense tensor in a graph",
                    where=step.where,
                    fix="Return tf.IndexedSlices of the same indices",
                )
        flat = flattened(spread, self.lengths)
        found = [value for value, there in zip(flat, self.present, strict=True) if there]
        if any(value is None for value in found):
            raise RoutineResultError(
                "A routine returned None for one of several values",
                where=step.where,
                fix="Return None alone for no change, else each value; zeros for no gradient",
            )
        return found


def fold(
    steps: Sequence[Step], layout: Layout, dtypes_of: Sequence[int], frozen: Sequence[bool]
) -> Flat:
    """Return a function that applies `steps` in order, each to the results of the earlier ones.

    Args:
        steps: The steps.
        layout: Layout of their positions.
        dtypes_of: DataTypes of the flat tensors.
        frozen: Which of them cannot be changed, since they are references.
    """

    def run(flat: list[Any]) -> list[Any]:
        values = layout.group(flat)
        new = flat
        for step in steps:
            changed = step(values)
            for position, value in changed:
                _refuse_for_none(values[position], value, step)
                values[position] = value
            if changed:
                new = layout.flatten(values, step, new)
                new = [
                    as_tensor(value, dtype, step) if value is not old else old
                    for value, old, dtype in zip(new, flat, dtypes_of, strict=True)
                ]
                for value, old, is_frozen in zip(new, flat, frozen, strict=True):
                    if is_frozen and value is not old:
                        raise UnsupportedError(
                            "An input that the op writes to was edited",
                            where=step.where,
                            fix="Edit the outputs of the op, or another op's inputs",
                        )
        return list(new)

    return run


def observing_function(
    steps: Sequence[Step], layout: Layout, refused: AmandaError | None = None
) -> Flat:
    """Return a function that calls observing `steps` and returns nothing.

    Args:
        steps: The steps.
        layout: Layout of their positions.
        refused: Why values cannot be edited here; raised if a step edits after all.
    """

    def run(flat: list[Any]) -> list[Any]:
        values = layout.group(flat)
        for step in steps:
            if step(values) and refused is not None:
                raise UnsupportedError(refused.what, where=step.where, fix=refused.fix)
        return []

    return run


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 1


def _refuse_for_none(old: Any, new: Any, step: Step) -> None:
    """Refuse to replace a missing value, since nobody would read the new one."""
    olds, news = (old, new) if isinstance(old, list) and isinstance(new, list) else ([old], [new])
    if any(a is None and b is not None for a, b in zip(olds, news, strict=False)):
        raise UnsupportedError(
            "A routine returned a value for a position that has no value",
            where=step.where,
            fix="Return None for each value that is None",
        )


def refuse_changes(flat: Flat, step: Step, why: str, fix: str) -> Flat:
    """Wrap a fold so that any change is refused for the reason `why`."""

    def run(values: list[Any]) -> list[Any]:
        new = flat(values)
        if any(a is not b for a, b in zip(new, values, strict=True)):
            raise UnsupportedError(why, where=step.where, fix=fix)
        return new

    return run


def keep_shapes(
    flat: Flat, shapes: Sequence[Any], step: Step, straight: Collection[int] = ()
) -> Flat:
    """Wrap a fold so that its results keep the shapes that the graph's gradients were built for.

    Args:
        flat: The fold.
        shapes: The shapes that the graph was built for; None where unknown.
        step: The step, or the first of several.
        straight: Indices of values that are edited straight through, so that their gradient is used
            as the gradient of the original value.
    """

    def run(values: list[Any]) -> list[Any]:
        new = flat(values)
        for index, (value, old, shape) in enumerate(zip(new, values, shapes, strict=True)):
            if value is old:
                continue
            new[index] = check_shape(value, shape, step)
            if index in straight:
                new[index] = check_same_shape(
                    new[index],
                    old,
                    step,
                    "a tensor of shape {} for one of shape {}, whose gradient is not that of what "
                    "was returned",
                    "Return a tensor of the same shape, or insert it under autodiff_enabled()",
                )
        return new

    return run


def keep_gradient_shapes(flat: Flat, step: Step, dense: Collection[int]) -> Flat:
    """Wrap a fold over gradients so that the `dense` ones keep their shapes."""

    def run(values: list[Any]) -> list[Any]:
        new = flat(values)
        for index in dense:
            if new[index] is not values[index]:
                new[index] = check_same_shape(
                    new[index],
                    values[index],
                    step,
                    "a gradient of shape {} for one of shape {}",
                    "Return a gradient of the same shape",
                )
        return new

    return run


def as_tensor(value: Any, dtype: int, step: Step) -> Any:
    """Convert a routine's result to a tensor of the dtype that the graph has there."""
    wanted = dtypes.as_dtype(dtype).base_dtype
    if isinstance(value, tf.Variable):
        value = value.read_value()
    try:
        return tf.convert_to_tensor(value, dtype=wanted)
    except (TypeError, ValueError) as error:
        found = getattr(value, "dtype", type(value).__name__)
        raise RoutineResultError(
            f"A routine returned {found!s} where the graph has {wanted.name}",
            where=step.where,
            fix=f"Return a tensor of {wanted.name}, for instance with tf.cast",
        ) from error


def replacement_function(
    step: Step, layout: Layout, dtypes_of: Sequence[int], shapes: Sequence[Any] = ()
) -> Flat:
    """Return a function that computes the outputs of a replaced op.

    Args:
        step: The replacement.
        layout: Layout of its inputs.
        dtypes_of: DataTypes of its outputs.
        shapes: The shapes that gradients were built for, if there are gradients; None where
            unknown.
    """

    def run(flat: list[Any]) -> list[Any]:
        result = step.replace(layout.group(flat))
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        if len(outputs) != len(dtypes_of):
            raise RoutineResultError(
                f"A replacement returned {len(outputs)} values instead of {len(dtypes_of)}",
                where=step.where,
                fix="Return what the op would have returned",
            )
        made = [as_tensor(v, dtype, step) for v, dtype in zip(outputs, dtypes_of, strict=True)]
        return [
            check_shape(value, shape, step) for value, shape in itertools.zip_longest(made, shapes)
        ]

    return run


def backward_replacement_function(
    step: Step,
    given: Layout,
    made: Layout,
    absent: Layout,
    dtypes_of: Sequence[int],
    shapes: Sequence[Any],
) -> Flat:
    """Return a function that computes the gradients of an op whose backward was replaced.

    Args:
        step: The replacement.
        given: Layout of the gradients of the outputs.
        made: Layout of the gradients of the inputs; `present` marks those that the graph needs.
        absent: The same layout; `present` marks those that the graph has no reader for.
        dtypes_of: DataTypes of the needed gradients.
        shapes: Their shapes; None where unknown.
    """
    # At a position that is a list of tensors, only some of these may be needed.
    needed = made.group([True] * sum(made.present))
    wanted = [p for p, there in enumerate(needed) if any(tf.nest.flatten([there]))]
    none = absent.group([True] * sum(absent.present))

    def run(flat: list[Any]) -> list[Any]:
        result = step.replace(given.group(flat))
        gradients = list(result) if isinstance(result, (list, tuple)) else [result]
        if len(gradients) == 1 and len(wanted) == 1:
            positions: list[Any] = [None] * len(needed)
            positions[wanted[0]] = gradients[0]
        else:
            positions = [*gradients, *[None] * (len(needed) - len(gradients))]
        extra = any(gradient is not None for gradient in positions[len(needed) :])
        if extra or any(positions[p] is None for p in wanted):
            raise RoutineResultError(
                f"A replacement returned {len(gradients)} gradients, but those of the inputs "
                f"{wanted} are needed",
                where=step.where,
                fix="Return one gradient for each leading input up to the last one needed",
            )
        for position, (gradient, is_lost) in enumerate(zip(positions, none, strict=False)):
            parts = zip(_listed(gradient), _listed(is_lost), strict=False)
            if any(part is not None and is_lost for part, is_lost in parts):
                raise lost_gradient_error(position, step)
        new = made.flatten(
            [positions[p] if p in wanted else there for p, there in enumerate(needed)], step
        )
        tensors = [as_tensor(v, dtype, step) for v, dtype in zip(new, dtypes_of, strict=True)]
        return [
            check_shape(value, shape, step) for value, shape in zip(tensors, shapes, strict=True)
        ]

    return run


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]
