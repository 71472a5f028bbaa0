"""Counting zeros of tensors: elements, channels, blocks, groups of four.

Owns the counting and the order of axes, which is the same for each layout. In main memory, a tensor
without zeros needs two reductions, and the others follow. On other devices, nothing is waited for:
tensors of PyTorch and TensorFlow are counted by their own operators, and only the final numbers
leave the device.
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
    "to_list",
]

#: Names of the elements of `Counts.numbers`, in order.
NUMBERS = ("zeros", "small", "zero_channels", "zero_blocks", "compliant")
#: How many elements a group of N:M sparsity has, and how many of them may be other than zero.
GROUP, FILLED = 4, 2


class Arrays(Protocol):
    """The operations of one framework that counting needs."""

    def filled(self, x: Any) -> int | None:
        """Return how many elements are not zero, or None if a device had to be waited for."""

    def nonzero(self, x: Any) -> Any:
        """Return a mask of the elements that are not zero."""

    def small(self, x: Any, limit: float) -> Any:
        """Return a mask of the elements whose magnitude is below a limit."""

    def transpose(self, x: Any, axes: Sequence[int]) -> Any:
        """Return `x` with its axes in another order."""

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """Return `x` in another shape."""

    def pad(self, x: Any, rows: int, columns: int) -> Any:
        """Return a matrix with rows and columns of zeros or False added at its end."""

    def count(self, x: Any, axes: Sequence[int] | None = None) -> Any:
        """Return how many elements are True, or the sum of counts, over all or some axes."""

    def any(self, x: Any, axes: Sequence[int]) -> Any:
        """Return whether any element is True over some axes, the last axis given first."""

    def to_float(self, x: Any) -> Any:
        """Return a number of int64 as float64."""


class _Torch:
    def filled(self, x: Any) -> int | None:
        return int(x.count_nonzero()) if x.is_cpu else None

    def nonzero(self, x: Any) -> Any:
        return x != 0

    def small(self, x: Any, limit: float) -> Any:
        return x.abs() < limit

    def transpose(self, x: Any, axes: Sequence[int]) -> Any:
        return x.permute(tuple(axes))

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return x.reshape(tuple(shape))

    def pad(self, x: Any, rows: int, columns: int) -> Any:
        import torch

        return torch.nn.functional.pad(x, (0, columns, 0, rows))

    def count(self, x: Any, axes: Sequence[int] | None = None) -> Any:
        # For masks this is several times faster than a sum.
        return x.count_nonzero() if axes is None and x.dtype.itemsize == 1 else x.sum(axes)

    def any(self, x: Any, axes: Sequence[int]) -> Any:
        for axis in axes:
            x = x.any(axis)
        return x

    def to_float(self, x: Any) -> Any:
        return x.double()


class _TensorFlow:
    def filled(self, x: Any) -> int | None:
        return None

    def nonzero(self, x: Any) -> Any:
        import tensorflow as tf

        return tf.not_equal(x, tf.zeros([], x.dtype))

    def small(self, x: Any, limit: float) -> Any:
        import tensorflow as tf

        return tf.less(tf.abs(x), tf.cast(limit, x.dtype))

    def transpose(self, x: Any, axes: Sequence[int]) -> Any:
        import tensorflow as tf

        return tf.transpose(x, list(axes))

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        import tensorflow as tf

        return tf.reshape(x, list(shape))

    def pad(self, x: Any, rows: int, columns: int) -> Any:
        import tensorflow as tf

        return tf.pad(x, [[0, rows], [0, columns]])

    def count(self, x: Any, axes: Sequence[int] | None = None) -> Any:
        import tensorflow as tf

        return tf.reduce_sum(tf.cast(x, tf.int64), axes)

    def any(self, x: Any, axes: Sequence[int]) -> Any:
        import tensorflow as tf

        return tf.reduce_any(x, axes)

    def to_float(self, x: Any) -> Any:
        import tensorflow as tf

        return tf.cast(x, tf.float64)


class _Numpy:
    def filled(self, x: Any) -> int | None:
        import numpy as np

        return int(np.count_nonzero(x))

    def nonzero(self, x: Any) -> Any:
        return x != 0

    def small(self, x: Any, limit: float) -> Any:
        return abs(x) < limit

    def transpose(self, x: Any, axes: Sequence[int]) -> Any:
        return x.transpose(tuple(axes))

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return x.reshape(tuple(shape))

    def pad(self, x: Any, rows: int, columns: int) -> Any:
        import numpy as np

        return np.pad(x, ((0, rows), (0, columns)))

    def count(self, x: Any, axes: Sequence[int] | None = None) -> Any:
        return x.sum(None if axes is None else tuple(axes), dtype="int64")

    def any(self, x: Any, axes: Sequence[int]) -> Any:
        return x.any(tuple(axes))

    def to_float(self, x: Any) -> Any:
        return x.astype("float64")


#: Framework -> the operations that count in its own tensors.
_OWN: dict[str, Arrays] = {"pytorch": _Torch(), "tensorflow": _TensorFlow()}
_NUMPY: Arrays = _Numpy()


def arrays_of(namespace: str) -> Arrays:
    """Return the operations for the tensors of a namespace."""
    return _OWN.get(namespace.partition("/")[0], _NUMPY)


def to_list(vector: Any) -> list[int]:
    """Return the numbers of a vector of any framework, once its device has computed them."""
    found: list[int] = (vector if hasattr(vector, "tolist") else vector.numpy()).tolist()
    return found


def readable(facts: Facts, arrays: Arrays, x: Any) -> tuple[Any, Arrays] | None:
    """Return a floating-point tensor in a form that can be counted, and the operations for it; None
    for any other value.

    Raises:
        NotReadableError: Its elements cannot be counted.
    """
    if not facts.is_tensor(x) or "float" not in facts.dtype(x):
        return None
    layout = facts.layout(x)
    if layout != DENSE:
        raise NotReadableError(f"a {type(x).__name__} that is not dense: {layout}")
    if arrays is _NUMPY:
        held = host(facts, x)
        return numbers(held.array, held.dtype), arrays
    if isinstance(arrays, _TensorFlow) and facts.device(x) == "cpu":
        import numpy as np

        array = np.asarray(x)
        if array.dtype.kind == "f":
            return array, _NUMPY  # Where it is, without an operator for each step.
    return x, arrays


class Order(NamedTuple):
    """How a tensor is read as a matrix, independent of its layout.

    Attributes:
        rows: Axes that make the rows, in order.
        columns: Axes that make the columns, in order.
        group: The axis along which N:M groups lie.
        channels: Axes of the channels: `rows` or `columns`.
        inner: The axis of a weight's input channels, or None.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    group: int
    channels: tuple[int, ...]
    inner: int | None = None


def order_of_weight(layout: str) -> Order:
    """Return how to read a weight: output channels by input channels and kernel positions.

    Groups lie along the input channels.

    >>> order_of_weight("HWIO")
    Order(rows=(3,), columns=(2, 0, 1), group=2, channels=(3,), inner=2)
    """
    # A depthwise weight has I times M output channels, each with one input channel.
    outer, inner = ("IM", "") if "M" in layout and "I" in layout else ("O", "IM")
    rows = tuple(layout.index(axis) for axis in outer if axis in layout)
    inside = tuple(layout.index(axis) for axis in inner if axis in layout)
    places = tuple(layout.index(axis) for axis in "DHW" if axis in layout)
    columns = inside + places
    return Order(rows, columns, columns[0], rows, inside[0] if inside else None)


def order_of(rank: int, layout: str | None, first: bool) -> Order | None:
    """Return how to read an activation: samples and positions by channels.

    Groups lie along the channels. A tensor with fewer than two axes is not a matrix: None.

    Args:
        rank: Number of axes.
        layout: Its layout, such as ``NCHW``, or None.
        first: Whether channels are the second axis if the layout does not tell. Else they are last.
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
    """The counts of one tensor; those that are tensors stay on its device.

    Attributes:
        arrays: The operations for the counts that are tensors.
        numbers: Those of `NUMBERS`.
        channels: Vector: how many elements of each channel are not zero; one number if it is the
            same for all. None without channels.
        inner: The same for the input channels of a weight.
        width: How many channels there are.
        depth: How many input channels there are.
        elements: How many elements there are.
        blocks: How many blocks there are.
        groups: How many groups of four there are.
    """

    arrays: Arrays
    numbers: tuple[Any, ...]
    channels: Any
    inner: Any
    width: int
    depth: int
    elements: int
    blocks: int
    groups: int

    @property
    def filled(self) -> Any:
        """Return how many elements are not zero."""
        return self.elements - self.numbers[0]


def count(arrays: Arrays, x: Any, order: Order | None, block: int, limit: float) -> Counts:
    """Count the zeros of a tensor that is not empty.

    Args:
        arrays: The operations of its framework.
        x: The tensor, of any real dtype.
        order: How it is read as a matrix. With None only single elements are counted.
        block: Side of the blocks. Blocks at the edges may be smaller.
        limit: Magnitudes below it are small.
    """
    shape = tuple(map(int, x.shape))
    elements = math.prod(shape)
    filled = arrays.filled(x)
    small = arrays.count(arrays.small(x, limit))
    if filled is not None:
        small = int(small)
    if order is None:
        there = arrays.count(arrays.nonzero(x)) if filled is None else filled
        counted = elements - there, small, 0, 0, 0
        return Counts(arrays, counted, None, None, 0, 0, elements, 0, 0)
    width = math.prod(shape[axis] for axis in order.columns)
    height = elements // width
    channels = math.prod(shape[axis] for axis in order.channels)
    depth = 0 if order.inner is None else shape[order.inner]
    blocks = -(-height // block) * -(-width // block)
    length = shape[order.group]
    groups = elements // length * -(-length // GROUP)
    sizes = channels, depth, elements, blocks, groups
    if filled == elements:
        # Of the groups, only those at the end of an axis may have few enough elements.
        compliant = elements // length if 0 < length % GROUP <= FILLED else 0
        inner = elements // depth if depth else None
        counted = 0, small, 0, 0, compliant
        return Counts(arrays, counted, elements // channels, inner, *sizes)
    nonzero = arrays.nonzero(x)
    matrix = arrays.reshape(arrays.transpose(nonzero, order.rows + order.columns), (height, width))
    by_inner = None
    if order.channels == order.rows:
        by_channel = arrays.count(matrix, [1])
        if depth:
            by_column = arrays.count(matrix, [0])
            by_inner = arrays.count(arrays.reshape(by_column, (depth, -1)), [1])
    else:
        by_channel = arrays.count(matrix, [0])
    numbers: tuple[Any, ...] = (
        elements - (arrays.count(by_channel) if filled is None else filled),
        small,
        arrays.count(by_channel == 0),
        blocks - arrays.count(_blocks(arrays, matrix, height, width, block)),
        arrays.count(_groups(arrays, nonzero, shape, order) <= FILLED),
    )
    if filled is not None:
        numbers = tuple(map(int, numbers))
    return Counts(arrays, numbers, by_channel, by_inner, *sizes)


def _blocks(arrays: Arrays, matrix: Any, height: int, width: int, side: int) -> Any:
    """Return which blocks hold anything but zeros."""
    if height % side or width % side:
        matrix = arrays.pad(matrix, -height % side, -width % side)
    down, across = -(-height // side), -(-width // side)
    return arrays.any(arrays.reshape(matrix, (down, side, across, side)), [3, 1])


def _groups(arrays: Arrays, nonzero: Any, shape: Sequence[int], order: Order) -> Any:
    """Return how many elements of each group are not zero.

    A group does not go beyond the end of its axis.
    """
    length = shape[order.group]
    height = math.prod(shape) // length
    others = [axis for axis in order.rows + order.columns if axis != order.group]
    rows = arrays.reshape(arrays.transpose(nonzero, [*others, order.group]), (height, length))
    if length % GROUP:
        rows = arrays.pad(rows, 0, -length % GROUP)
    return arrays.count(arrays.reshape(rows, (-1, GROUP)), [1])
