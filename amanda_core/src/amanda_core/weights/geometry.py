"""Geometry: the part of a parameter that a value shows, computed from where both lie in memory.

Owns the arithmetic of offsets, shapes and strides. It does not read or keep tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import NamedTuple

__all__ = [
    "Memory",
    "Place",
    "Region",
    "contiguous",
    "extents_of",
    "place_in",
    "region_text",
]

#: An index for each leading axis of a parameter. Axes that are left out are whole.
Region = tuple["int | slice", ...]


class Memory(NamedTuple):
    """Where the elements of a tensor lie.

    Attributes:
        key: Identifies the memory among all that is in use.
        offset: Where the first element lies, in elements.
        shape: Its dimensions.
        strides: Distance of neighbours along each axis, in elements.
        itemsize: Bytes of one element.
    """

    key: Hashable
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class Place(NamedTuple):
    """The part of a parameter that a value shows.

    Attributes:
        region: Indices into the parameter; empty for all of it.
        exact: Whether the value shows all elements of the region and no others.
        axes: For each axis of the value the parameter's axis that it runs along; None for an axis
            that is new, broadcast, or made of several axes.
    """

    region: Region
    exact: bool
    axes: tuple[int | None, ...]


def place_in(parameter: Memory, value: Memory) -> Place | None:
    """Return the part of `parameter` that `value` shows; None if it shows none.

    >>> whole = Memory(0, 0, (4, 6), (6, 1), 4)
    >>> place_in(whole, Memory(0, 6, (6,), (1,), 4))
    Place(region=(1,), exact=True, axes=(1,))
    >>> place_in(whole, Memory(0, 12, (6, 2), (1, 6), 4))
    Place(region=(slice(2, 4, None),), exact=True, axes=(1, 0))
    """
    if parameter.key != value.key or 0 in parameter.shape or 0 in value.shape:
        return None
    start = value.offset - parameter.offset
    return _place_from(
        start, parameter._replace(key=None, offset=0), value._replace(key=None, offset=0)
    )


# The layers of a model have the same shapes.
@functools.lru_cache(maxsize=1024)
def _place_from(start: int, parameter: Memory, value: Memory) -> Place | None:
    """Return the part of a parameter that a value shows which begins `start` elements after it."""
    if parameter.itemsize != value.itemsize:
        return Place((), False, (None,) * len(value.shape))
    moving = _moving(value)
    outermost = sorted(
        _moving(parameter), key=lambda axis: (-parameter.strides[axis], -parameter.shape[axis])
    )
    length = sum((value.shape[axis] - 1) * value.strides[axis] for axis in moving)
    first = _indices(start, parameter, outermost)
    last = _indices(start + length, parameter, outermost)
    if first is None or last is None:
        return None
    spans = [z - a for a, z in zip(first, last, strict=True)]
    along = {
        axis: _axis_along(value.shape[axis], value.strides[axis], parameter, outermost, spans)
        for axis in moving
    }
    axes = tuple(along.get(axis) for axis in range(len(value.shape)))
    steps = _steps(parameter, value, along, spans)
    if steps is None:
        return Place((), False, axes)
    region = list(map(_index, first, last, steps, parameter.shape))
    while region and region[-1] == slice(None):
        region.pop()
    return Place(tuple(region), True, axes)


def _moving(memory: Memory) -> list[int]:
    """Return the axes along which there are several elements."""
    return [axis for axis, size in enumerate(memory.shape) if size > 1 and memory.strides[axis]]


def _indices(offset: int, parameter: Memory, outermost: list[int]) -> list[int] | None:
    """Return the indices of the element at `offset`; None if there is none.

    Args:
        offset: Where the element lies from the first one on.
        parameter: The parameter.
        outermost: Its axes with several elements, that of the largest stride first.
    """
    indices = [0] * len(parameter.shape)
    if offset < 0:
        return None
    for axis in outermost:
        indices[axis] = min(offset // parameter.strides[axis], parameter.shape[axis] - 1)
        offset -= indices[axis] * parameter.strides[axis]
    return indices if offset == 0 else None


def _axis_along(
    count: int, stride: int, parameter: Memory, outermost: list[int], spans: list[int]
) -> int | None:
    """Return the axis of a parameter on which `count` elements at distance `stride` span what the
    value spans there; None if there is none.
    """
    for axis in outermost:
        steps, between = divmod(stride, parameter.strides[axis])
        if not between and (count - 1) * steps == spans[axis]:
            return axis
    return None


def _steps(
    parameter: Memory, value: Memory, along: dict[int, int | None], spans: list[int]
) -> list[int] | None:
    """Return the region's step along each axis; None if no region has the elements of the value.

    Args:
        parameter: The parameter.
        value: The value that shows a part of it.
        along: Each axis of the value that has several elements -> the parameter's axis.
        spans: Difference of the last and the first index along each axis of the parameter.
    """
    if min(spans, default=0) < 0:
        return None
    steps = [1] * len(spans)
    shown = math.prod(value.shape[axis] for axis in along)
    if math.prod(span + 1 for span in spans) == shown:
        return steps
    for axis, own in along.items():
        if own is None or list(along.values()).count(own) > 1:
            return None
        steps[own] = max(1, value.strides[axis] // parameter.strides[own])
    counts = [span // step + 1 for span, step in zip(spans, steps, strict=True)]
    return steps if math.prod(counts) == shown else None


def _index(first: int, last: int, step: int, size: int) -> int | slice:
    if last - first + 1 == size and step == 1:
        return slice(None)
    if first == last:
        return first
    return slice(first, last + 1, step if step > 1 else None)


def extents_of(region: Region, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many indices a region has along each axis of a parameter of this shape.

    >>> extents_of((3, slice(0, 8, 2)), (4, 16, 5))
    (1, 4, 5)
    """
    given = zip(region, shape, strict=False)
    counts = [1 if isinstance(i, int) else len(range(*i.indices(size))) for i, size in given]
    return (*counts, *shape[len(counts) :])


def region_text(region: Region) -> str:
    """Return a region as it is written in Python, empty for all of a parameter.

    >>> region_text((3, slice(None), slice(0, 8)))
    '[3, :, 0:8]'
    """
    if not region:
        return ""
    return f"[{', '.join(map(_index_text, region))}]"


def _index_text(index: int | slice) -> str:
    if isinstance(index, int):
        return str(index)
    bounds = ":".join("" if bound is None else str(bound) for bound in (index.start, index.stop))
    return f"{bounds}:{index.step}" if index.step is not None else bounds


def contiguous(key: Hashable, address: int, shape: tuple[int, ...], size: int) -> Memory:
    """Return where the elements of a tensor lie that has no gaps.

    Args:
        key: Identifies the memory.
        address: That of the first byte, which is a multiple of the size of an element.
        shape: Its dimensions, none of which is 0.
        size: Its bytes.
    """
    itemsize = size // math.prod(shape)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Memory(key, address // itemsize, shape, strides, itemsize)
