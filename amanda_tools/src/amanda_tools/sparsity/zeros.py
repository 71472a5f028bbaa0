"""Counting zeros of tensors: elements, channels, blocks, groups of four.

Owns the counting and the order of axes, which is the same for each layout. In main memory, a tensor
without zeros needs two reductions, and the others follow. On other devices, nothing is waited for:
if the driver's arithmetic can count, only the final numbers leave the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from amanda_core.interface.facts import DENSE, Arithmetic, Facts, NotReadableError
from amanda_tools.kit.tensors.arithmetic import numpy_arithmetic
from amanda_tools.kit.tensors.values import host, numbers

__all__ = [
    "Counts",
    "Order",
    "count",
    "order_of",
    "order_of_weight",
    "readable",
    "to_list",
    "without_zeros",
]

#: Names of the elements of `Counts.numbers`, in order.
NUMBERS = ("zeros", "small", "zero_channels", "zero_blocks", "compliant")
#: How many elements a group of N:M sparsity has, and how many of them may be other than zero.
GROUP, FILLED = 4, 2
#: Dtypes that NumPy counts fast.
_PLAIN = frozenset({"float32", "float64"})
_PLAIN_TYPE = frozenset({int})


def to_list(facts: Facts, vector: Any) -> list[int]:
    """Return the numbers of a vector, once its device has computed them."""
    found: list[int]
    found = (vector if hasattr(vector, "tolist") else facts.values(vector)).tolist()
    return found


def readable(facts: Facts, x: Any) -> tuple[Any, Arithmetic, bool] | None:
    """Return a floating-point tensor in a form that can be counted, the arithmetic for it, and
    whether its numbers may be asked for at once; None for any other value.

    Raises:
        NotReadableError: Its elements cannot be counted.
    """
    if not facts.is_tensor(x) or "float" not in facts.dtype(x):
        return None
    x = facts.local(x)  # What is in this process; other operators on it may communicate.
    layout = facts.layout(x)
    if layout != DENSE:
        raise NotReadableError(f"a {type(x).__name__} that is not dense: {layout}")
    on_host = facts.device(x) == "cpu"
    if on_host and (facts.shares_memory or facts.dtype(x) in _PLAIN):
        array = _array(facts, x)
        if array is not None and array.dtype.kind == "f":
            # Where it is, without an operator for each step.
            return array, numpy_arithmetic(), True
    if facts.arithmetic is not None and facts.arithmetic.counts:
        return x, facts.arithmetic, on_host
    held = host(facts, x)
    return numbers(held.array, held.dtype), numpy_arithmetic(), True


def _array(facts: Facts, x: Any) -> Any:
    """Return an array of NumPy on the memory of a tensor; None if it has more axes than NumPy has,
    and without NumPy.
    """
    try:
        import numpy
    except ImportError:
        return None
    held = facts.buffer(x)
    if not isinstance(held, (bytes, memoryview)):
        return numpy.asarray(held)
    shape: Any = facts.shape(x)
    try:
        return numpy.ndarray(shape, facts.dtype(x), held)
    except ValueError:  # Of the number of axes; the memory is that of the tensor.
        return None


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


@lru_cache(maxsize=256)
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


@lru_cache(maxsize=256)
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
        arithmetic: That of the counts that are tensors.
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

    arithmetic: Arithmetic
    numbers: tuple[Any, ...]
    channels: Any
    inner: Any
    width: int
    depth: int
    elements: int
    blocks: int
    groups: int

    @property
    def is_plain(self) -> bool:
        """Return True if all counts are Python's numbers, the same for all channels."""
        return isinstance(self.channels, (int, type(None))) and _PLAIN_TYPE.issuperset(
            map(type, self.numbers)
        )

    @property
    def filled(self) -> Any:
        """Return how many elements are not zero."""
        return self.elements - self.numbers[0]


class _Sizes(NamedTuple):
    """The counts of a tensor in which no element is zero, and the shape of its matrix."""

    counts: Counts
    height: int
    width: int


@lru_cache(maxsize=4096)
def _sizes(
    arithmetic: Arithmetic, shape: tuple[int, ...], order: Order | None, block: int
) -> _Sizes:
    elements = math.prod(shape)
    if order is None:
        return _Sizes(Counts(arithmetic, (0,) * 5, None, None, 0, 0, elements, 0, 0), 0, 0)
    width = math.prod(shape[axis] for axis in order.columns)
    height = elements // width
    channels = math.prod(shape[axis] for axis in order.channels)
    depth = 0 if order.inner is None else shape[order.inner]
    blocks = -(-height // block) * -(-width // block)
    length = shape[order.group]
    groups = elements // length * -(-length // GROUP)
    # Of the groups, only those at the end of an axis may have few enough elements.
    compliant = elements // length if 0 < length % GROUP <= FILLED else 0
    inner = elements // depth if depth else None
    counted = 0, 0, 0, 0, compliant
    sizes = channels, depth, elements, blocks, groups
    counts = Counts(arithmetic, counted, elements // channels, inner, *sizes)
    return _Sizes(counts, height, width)


def without_zeros(
    arithmetic: Arithmetic, shape: tuple[int, ...], order: Order | None, block: int
) -> Counts:
    """Return the counts of a tensor in which no element is zero or small; see `count`."""
    return _sizes(arithmetic, shape, order, block).counts


def count(
    arithmetic: Arithmetic,
    x: Any,
    order: Order | None,
    block: int,
    limit: float,
    at_once: bool = True,
    counted: tuple[int, int] | None = None,
) -> Counts:
    """Count the zeros of a tensor that is not empty.

    Args:
        arithmetic: That of its framework.
        x: The tensor, of any real dtype.
        order: How it is read as a matrix. With None only single elements are counted.
        block: Side of the blocks. Blocks at the edges may be smaller.
        limit: Magnitudes below it are small.
        at_once: Whether numbers may be asked for: they have to be waited for on a device.
        counted: How many elements are zero and small, if that is known.
    """
    shape = tuple(map(int, x.shape))
    known, height, width = _sizes(arithmetic, shape, order, block)
    elements = known.elements
    nonzero = arithmetic.astype(x, "bool")
    filled: int | None = None
    small: Any
    if counted is not None:
        filled, small = elements - counted[0], counted[1]
    else:
        if at_once:
            filled = int(arithmetic.count_nonzero(nonzero))
        small = arithmetic.count_nonzero(abs(x) < limit)
        small = int(small) if at_once else small
    if order is None:
        there = arithmetic.count_nonzero(nonzero) if filled is None else filled
        return known._replace(numbers=(elements - there, small, 0, 0, 0))
    if filled == elements:
        return known._replace(numbers=(0, small, *known.numbers[2:]))
    depth = known.depth
    matrix = arithmetic.permute_dims(nonzero, order.rows + order.columns)
    matrix = arithmetic.reshape(matrix, (height, width))
    by_inner = None
    if order.channels == order.rows:
        by_channel = arithmetic.count_nonzero(matrix, (1,))
        if depth:
            by_column = arithmetic.count_nonzero(matrix, (0,))
            by_inner = arithmetic.sum(arithmetic.reshape(by_column, (depth, -1)), (1,))
    else:
        by_channel = arithmetic.count_nonzero(matrix, (0,))
    numbers: tuple[Any, ...] = (
        elements - (arithmetic.sum(by_channel) if filled is None else filled),
        small,
        arithmetic.count_nonzero(by_channel == 0),
        known.blocks - arithmetic.count_nonzero(_blocks(arithmetic, matrix, height, width, block)),
        arithmetic.count_nonzero(_groups(arithmetic, nonzero, matrix, shape, order) <= FILLED),
    )
    if filled is not None:
        numbers = tuple(map(int, numbers))
    return known._replace(numbers=numbers, channels=by_channel, inner=by_inner)


def _blocks(arithmetic: Arithmetic, matrix: Any, height: int, width: int, side: int) -> Any:
    """Return which blocks hold anything but zeros."""
    if height % side or width % side:
        matrix = arithmetic.pad(matrix, (-height % side, -width % side))
    down, across = -(-height // side), -(-width // side)
    words = _words(matrix, side)
    if words is not None:
        return arithmetic.module.bitwise_or.reduce(words.reshape(down, side, across), axis=1)
    return arithmetic.any(arithmetic.reshape(matrix, (down, side, across, side)), (3, 1))


def _groups(
    arithmetic: Arithmetic, nonzero: Any, matrix: Any, shape: Sequence[int], order: Order
) -> Any:
    """Return how many elements of each group are not zero.

    A group does not go beyond the end of its axis.
    """
    length, rows = shape[order.group], matrix
    if order.columns[-1] != order.group:
        others = [axis for axis in order.rows + order.columns if axis != order.group]
        rows = arithmetic.permute_dims(nonzero, (*others, order.group))
    rows = arithmetic.reshape(rows, (-1, length))
    if length % GROUP:
        rows = arithmetic.pad(rows, (0, -length % GROUP))
    words = _words(rows, GROUP)
    if words is not None:
        # The highest byte of the product is the sum of the four bytes, which are 0 or 1.
        return words * words.dtype.type(0x01010101) >> 24
    return arithmetic.count_nonzero(arithmetic.reshape(rows, (-1, GROUP)), (1,))


def _words(rows: Any, side: int) -> Any:
    """Return each `side` elements of the rows of a NumPy array of booleans as one number; None for
    other tensors. NumPy's reductions take ten times as long over few elements.
    """
    if side in (2, 4, 8) and getattr(rows, "flags", None) is not None and rows.flags.c_contiguous:
        return rows.view(f"u{side}")
    return None
