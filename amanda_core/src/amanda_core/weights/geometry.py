"""Geometry: the part of a parameter that a value shows, computed from where both lie in memory.

Owns the arithmetic of offsets, shapes and strides. It does not read or keep tensors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

__all__ = ["Memory", "Place", "Region", "extents_of", "place_in", "region_text"]

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
    shape, strides = parameter.shape, parameter.strides
    if parameter.key != value.key or 0 in shape or 0 in value.shape:
        return None
    if parameter.itemsize != value.itemsize:
        return Place((), False, (None,) * len(value.shape))
    order = sorted(
        (axis for axis, size in enumerate(shape) if size > 1 and strides[axis]),
        key=lambda axis: (-strides[axis], -shape[axis]),
    )
    moves = [(n, t) for n, t in zip(value.shape, value.strides, strict=True) if n > 1 and t]
    offset = value.offset - parameter.offset
    first = _indices(offset, shape, strides, order)
    last = _indices(offset + sum((n - 1) * t for n, t in moves), shape, strides, order)
    if first is None or last is None:
        return None
    axes = tuple(
        next((a for a in order if _runs_along(n, t, a, first, last, strides)), None)
        if n > 1 and t
        else None
        for n, t in zip(value.shape, value.strides, strict=True)
    )
    extents = [z - a + 1 for a, z in zip(first, last, strict=True)]
    if min(extents, default=1) < 1:
        return Place((), False, axes)
    shown = math.prod(n for n, _ in moves)
    steps = [1] * len(shape)
    if math.prod(extents) != shown:
        known = [axis for axis in axes if axis is not None]
        for axis, (_, stride) in zip(known, moves, strict=False):
            steps[axis] = max(1, stride // strides[axis])
        counts = [(extent - 1) // step + 1 for extent, step in zip(extents, steps, strict=True)]
        if len(set(known)) < len(moves) or math.prod(counts) != shown:
            return Place((), False, axes)
    region = [
        _index(a, z, step, size) for a, z, step, size in zip(first, last, steps, shape, strict=True)
    ]
    while region and region[-1] == slice(None):
        region.pop()
    return Place(tuple(region), True, axes)


def _indices(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], order: list[int]
) -> list[int] | None:
    """Return the indices of the element at `offset`; None if there is none."""
    indices = [0] * len(shape)
    if offset < 0:
        return None
    for axis in order:
        indices[axis] = min(offset // strides[axis], shape[axis] - 1)
        offset -= indices[axis] * strides[axis]
    return indices if offset == 0 else None


def _runs_along(
    count: int, stride: int, axis: int, first: list[int], last: list[int], strides: tuple[int, ...]
) -> bool:
    return stride % strides[axis] == 0 and (count - 1) * (stride // strides[axis]) == (
        last[axis] - first[axis]
    )


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
