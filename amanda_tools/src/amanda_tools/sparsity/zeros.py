"""Counting zeros of tensors: elements, channels, blocks, groups of four.

Owns the counting and the order of axes in which it is done, the same for each layout. With PyTorch
and TensorFlow it is done by their own operators, and nothing but the final numbers leaves the
tensor's device; with other frameworks on copies in main memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from amanda_core.facts import DENSE, Facts, NotReadableError
from amanda_tools.tensors.values import host, numbers

__all__ = [
    "Arrays",
    "Counts",
    "Order",
    "arrays_of",
    "count",
    "order_of",
    "order_of_weight",
    "readable",
]

#: What the counts of `Counts.numbers` are, in order.
NUMBERS = ("zeros", "small", "zero_channels", "zero_blocks", "compliant")
#: How many elements a group of N:M sparsity has, and how many of them may be there.
GROUP, FILLED = 4, 2


class Arrays(Protocol):
    """The few operations that counting takes, in one framework."""

    def filled(self, x: Any) -> Any:
        """Where `x` is not zero."""

    def small(self, x: Any, limit: float) -> Any:
        """Where the magnitude of `x` is below a limit."""

    def ordered(self, x: Any, axes: Sequence[int]) -> Any:
        """With the axes in another order."""

    def shaped(self, x: Any, shape: Sequence[int]) -> Any:
        """In another shape."""

    def padded(self, x: Any, rows: int, columns: int) -> Any:
        """A matrix with so many more rows and columns of nothing."""

    def number(self, x: Any, axes: Sequence[int] | None = None) -> Any:
        """Return how many hold, as int64, over all or some axes."""

    def held(self, x: Any, axes: Sequence[int]) -> Any:
        """Return whether any holds, over some axes, the last one first."""

    def stacked(self, numbers: Sequence[Any]) -> Any:
        """Numbers as a vector of int64."""

    def real(self, x: Any) -> Any:
        """A number of int64 as float64."""

    def host(self, x: Any) -> list[Any]:
        """The numbers of a vector."""


class _Torch:
    def filled(self, x: Any) -> Any:
        return x != 0

    def small(self, x: Any, limit: float) -> Any:
        return x.abs() < limit

    def ordered(self, x: Any, axes: Sequence[int]) -> Any:
        return x.permute(tuple(axes))

    def shaped(self, x: Any, shape: Sequence[int]) -> Any:
        return x.reshape(tuple(shape))

    def padded(self, x: Any, rows: int, columns: int) -> Any:
        import torch

        return torch.nn.functional.pad(x, (0, columns, 0, rows))

    def number(self, x: Any, axes: Sequence[int] | None = None) -> Any:
        # Of truth values, several times faster than a sum.
        return x.count_nonzero() if axes is None and x.dtype.itemsize == 1 else x.sum(axes)

    def held(self, x: Any, axes: Sequence[int]) -> Any:
        for axis in axes:
            x = x.any(axis)
        return x

    def stacked(self, numbers: Sequence[Any]) -> Any:
        import torch

        return torch.stack(list(numbers))

    def real(self, x: Any) -> Any:
        return x.double()

    def host(self, x: Any) -> list[Any]:
        found: list[Any] = x.tolist()
        return found


class _TensorFlow:
    def filled(self, x: Any) -> Any:
        import tensorflow as tf

        return tf.not_equal(x, tf.zeros([], x.dtype))

    def small(self, x: Any, limit: float) -> Any:
        import tensorflow as tf

        return tf.less(tf.abs(x), tf.cast(limit, x.dtype))

    def ordered(self, x: Any, axes: Sequence[int]) -> Any:
        import tensorflow as tf

        return tf.transpose(x, list(axes))

    def shaped(self, x: Any, shape: Sequence[int]) -> Any:
        import tensorflow as tf

        return tf.reshape(x, list(shape))

    def padded(self, x: Any, rows: int, columns: int) -> Any:
        import tensorflow as tf

        return tf.pad(x, [[0, rows], [0, columns]])

    def number(self, x: Any, axes: Sequence[int] | None = None) -> Any:
        import tensorflow as tf

        return tf.reduce_sum(tf.cast(x, tf.int64), axes)

    def held(self, x: Any, axes: Sequence[int]) -> Any:
        import tensorflow as tf

        return tf.reduce_any(x, axes)

    def stacked(self, numbers: Sequence[Any]) -> Any:
        import tensorflow as tf

        return tf.stack(list(numbers))

    def real(self, x: Any) -> Any:
        import tensorflow as tf

        return tf.cast(x, tf.float64)

    def host(self, x: Any) -> list[Any]:
        found: list[Any] = x.numpy().tolist()
        return found


class _Numpy:
    def filled(self, x: Any) -> Any:
        return x != 0

    def small(self, x: Any, limit: float) -> Any:
        return abs(x) < limit

    def ordered(self, x: Any, axes: Sequence[int]) -> Any:
        return x.transpose(tuple(axes))

    def shaped(self, x: Any, shape: Sequence[int]) -> Any:
        return x.reshape(tuple(shape))

    def padded(self, x: Any, rows: int, columns: int) -> Any:
        import numpy as np

        return np.pad(x, ((0, rows), (0, columns)))

    def number(self, x: Any, axes: Sequence[int] | None = None) -> Any:
        return x.sum(None if axes is None else tuple(axes), dtype="int64")

    def held(self, x: Any, axes: Sequence[int]) -> Any:
        return x.any(tuple(axes))

    def stacked(self, numbers: Sequence[Any]) -> Any:
        import numpy as np

        return np.stack(list(numbers))

    def real(self, x: Any) -> Any:
        return x.astype("float64")

    def host(self, x: Any) -> list[Any]:
        found: list[Any] = x.tolist()
        return found


#: Framework -> what counts in its own tensors.
_OWN: dict[str, Arrays] = {"pytorch": _Torch(), "tensorflow": _TensorFlow()}
_NUMPY: Arrays = _Numpy()


def arrays_of(namespace: str) -> Arrays:
    """Return what counts in the tensors that `readable` gives in a namespace."""
    return _OWN.get(namespace.partition("/")[0], _NUMPY)


def readable(facts: Facts, arrays: Arrays, x: Any) -> Any:
    """Return a floating-point tensor as `arrays` counts in it; None for any other value.

    Raises:
        NotReadableError: Its elements cannot be counted.
    """
    if not facts.is_tensor(x) or "float" not in facts.dtype(x):
        return None
    layout = facts.layout(x)
    if layout != DENSE:
        raise NotReadableError(f"a {type(x).__name__} that is not dense: {layout}")
    if arrays is not _NUMPY:
        return x
    held = host(facts, x)
    return numbers(held.array, held.dtype)


class Order(NamedTuple):
    """How a tensor is looked at as a matrix, whatever its layout.

    Attributes:
        rows: Axes that make the rows, in order.
        columns: Axes that make the columns, in order.
        group: The axis along which N:M groups lie.
        channels: Axes of the channels: `rows` or `columns`.
        inner: Of a weight: the axis of input channels, or None.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    group: int
    channels: tuple[int, ...]
    inner: int | None = None


def order_of_weight(layout: str) -> Order:
    """A weight's: output channels by input channels and places, groups along input channels.

    >>> order_of_weight("HWIO")
    Order(rows=(3,), columns=(2, 0, 1), group=2, channels=(3,), inner=2)
    """
    # Of a depthwise weight there are I times M output channels and one input channel each.
    outer, inner = ("IM", "") if "M" in layout and "I" in layout else ("O", "IM")
    rows = tuple(layout.index(axis) for axis in outer if axis in layout)
    inside = tuple(layout.index(axis) for axis in inner if axis in layout)
    places = tuple(layout.index(axis) for axis in "DHW" if axis in layout)
    columns = inside + places
    return Order(rows, columns, columns[0], rows, inside[0] if inside else None)


def order_of(rank: int, layout: str | None, first: bool) -> Order | None:
    """An activation's: samples and places by channels, groups along channels.

    Args:
        rank: Number of axes; None is the answer for fewer than two.
        layout: Such as ``NCHW``, or None.
        first: Whether channels are the second axis where no layout says where they are.
    """
    if layout is not None and rank == len(layout) - 1:
        layout = layout.replace("N", "")  # One sample without a batch.
    if layout is not None and rank == len(layout) and "C" in layout:
        channel = layout.index("C")
    elif rank < 2:
        return None
    else:
        channel = 1 if first else rank - 1
    rows = tuple(axis for axis in range(rank) if axis != channel)
    return Order(rows, (channel,), channel, (channel,))


class Counts(NamedTuple):
    """What was counted of one tensor.

    Attributes:
        numbers: Vector of `NUMBERS`, where the tensor is.
        channels: Per channel, how many elements are not zero; there, too. None without channels.
        inner: The same per input channel of a weight.
        elements: How many elements there are.
        blocks: How many blocks.
        groups: How many groups of four.
    """

    numbers: Any
    channels: Any
    inner: Any
    elements: int
    blocks: int
    groups: int


def count(arrays: Arrays, x: Any, order: Order | None, block: int, limit: float) -> Counts:
    """Count the zeros of a tensor.

    Args:
        arrays: What counts in it.
        x: The tensor, of any dtype of real numbers.
        order: How it is looked at as a matrix; None counts single elements alone.
        block: Side of the blocks. What is left at the edges makes smaller blocks.
        limit: Magnitudes below it are small.
    """
    shape = [int(length) for length in x.shape]
    elements = math.prod(shape)
    filled = arrays.filled(x)
    small = arrays.number(arrays.small(x, limit))
    if order is None:
        there = arrays.number(filled)
        nothing = there - there
        numbers = arrays.stacked([elements - there, small, nothing, nothing, nothing])
        return Counts(numbers, None, None, elements, 0, 0)
    width = math.prod(shape[axis] for axis in order.columns)
    height = elements // width
    matrix = arrays.shaped(arrays.ordered(filled, order.rows + order.columns), (height, width))
    inner = None
    if order.channels == order.rows:
        channels = arrays.number(matrix, [1])
        if order.inner is not None:
            by_column = arrays.number(matrix, [0])
            inner = arrays.number(arrays.shaped(by_column, (shape[order.inner], -1)), [1])
    else:
        channels = arrays.number(matrix, [0])
    empty_blocks, blocks = _blocks(arrays, matrix, height, width, block)
    compliant, groups = _groups(arrays, filled, shape, order)
    empty_channels = arrays.number(channels == 0)
    there = arrays.number(channels)
    numbers = arrays.stacked([elements - there, small, empty_channels, empty_blocks, compliant])
    return Counts(numbers, channels, inner, elements, blocks, groups)


def _blocks(arrays: Arrays, matrix: Any, height: int, width: int, side: int) -> tuple[Any, int]:
    """Return how many blocks hold nothing, and how many there are."""
    if height % side or width % side:
        matrix = arrays.padded(matrix, -height % side, -width % side)
    down, across = -(-height // side), -(-width // side)
    held = arrays.held(arrays.shaped(matrix, (down, side, across, side)), [3, 1])
    return down * across - arrays.number(held), down * across


def _groups(arrays: Arrays, filled: Any, shape: list[int], order: Order) -> tuple[Any, int]:
    """Return how many groups comply, and how many there are; each is a row of its own."""
    length = shape[order.group]
    height = math.prod(shape) // length
    others = [axis for axis in order.rows + order.columns if axis != order.group]
    rows = arrays.shaped(arrays.ordered(filled, [*others, order.group]), (height, length))
    if length % GROUP:
        rows = arrays.padded(rows, 0, -length % GROUP)
    groups = height * -(-length // GROUP)
    fours = arrays.number(arrays.shaped(rows, (groups, GROUP)), [1])
    return arrays.number(fours <= FILLED), groups
