"""Selection of the contributions to an output, for effective paths.

Selects among the terms of a sum and the elements that a window covers. Works on NumPy arrays, many
outputs at once. NumPy is imported only when needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Covered", "Kept", "Windows", "chunks", "cumulative", "keep_terms", "maximal"]

#: Number of terms per chunk. The few arrays of a chunk stay in a core's cache.
_TERMS = 1 << 16
#: A first attempt sorts this share of the terms of a row, and at least so many.
_SHARE, _LEAST = 8, 16


def chunks(rows: int, terms: int) -> Iterator[slice]:
    """Split this many rows of this many terms into parts that fit into memory."""
    size = max(1, _TERMS // max(1, terms))
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def cumulative(terms: Any, valid: Any, theta: float) -> Any:
    """Keep the largest terms of each row that make up a share of its sum.

    Kept is the shortest prefix of the terms in descending order whose sum is at least `theta` of
    the whole; among equal terms the first. If the sum is not positive, or a single term is already
    a share of at least `theta` by count, only the largest term is kept.

    Args:
        terms: Terms of shape (rows, terms).
        valid: Which of them exist, of the same shape; None for all.
        theta: The share, above 0 and at most 1.

    Returns:
        Booleans of the shape of `terms`.
    """
    import numpy as np

    return _select(terms if valid is None else np.where(valid, terms, 0.0), valid, theta)[0]


def _select(terms: Any, valid: Any, theta: float) -> tuple[Any, Any]:
    """Return what `cumulative` keeps, and the least term that is kept of each row.

    Terms that do not exist must be 0.
    """
    import numpy as np

    number: Any = terms.shape[1] if valid is None else np.count_nonzero(valid, axis=1)
    total = terms.sum(axis=1)
    with np.errstate(divide="ignore"):
        alone = ~(total > 0) | (1 / np.asarray(number) >= theta)
    # Nothing is needed where only the largest term is kept: the first one is enough.
    least, count = _prefixes(terms, np.where(alone, -np.inf, theta * total))
    kept = terms >= least[:, None]
    if valid is not None:
        kept &= valid
    # Of equal terms possibly only the first ones are kept; or the largest one does not exist.
    tied = np.flatnonzero(np.count_nonzero(kept, axis=1) != count)
    if len(tied):
        shown = terms[tied] if valid is None else np.where(valid[tied], terms[tied], -np.inf)
        order = np.argsort(-shown, axis=1, kind="stable")
        first = np.zeros(shown.shape, bool)
        inside = np.arange(shown.shape[1]) < count[tied, None]
        np.put_along_axis(first, order, inside, axis=1)
        kept[tied] = first if valid is None else first & valid[tied]
        least[tied] = np.where(kept[tied], shown, np.inf).min(axis=1)
    return kept, least


def _prefixes(terms: Any, needed: Any) -> tuple[Any, Any]:
    """Return the least term and the number of terms of the shortest prefix of each row in
    descending order whose sum is at least what is needed.
    """
    import numpy as np

    width = terms.shape[1]
    size = min(width, max(_LEAST, width // _SHARE))
    largest = terms
    if size < width:
        largest = np.partition(terms, width - size, axis=1)[:, width - size :]
    ordered = np.sort(largest, axis=1)[:, ::-1]
    # The sums rise to a peak and then fall, never below the whole, so the first that is large
    # enough comes after all that are too small.
    count = np.count_nonzero(ordered.cumsum(axis=1) < needed[:, None], axis=1) + 1
    more = np.flatnonzero(count > size)
    if len(more):
        ordered_more = np.sort(terms[more], axis=1)[:, ::-1]
        found = np.count_nonzero(ordered_more.cumsum(axis=1) < needed[more, None], axis=1) + 1
        # Because of rounding, possibly no sum is large enough.
        found = np.where(found > width, np.count_nonzero(terms[more] > 0, axis=1), found)
        count[more] = found
    least = np.empty(len(terms))
    rest = np.flatnonzero(count <= size)
    least[rest] = ordered[rest, count[rest] - 1]
    if len(more):
        least[more] = ordered_more[np.arange(len(more)), found - 1]
    return least, count


def maximal(terms: Any, valid: Any, positive: bool) -> Any:
    """Keep the terms of each row that equal its maximum, with `positive` only if that is
    positive.
    """
    import numpy as np

    shown = terms if valid is None else np.where(valid, terms, -np.inf)
    kept = shown == shown.max(axis=1, keepdims=True)
    if valid is not None:
        kept &= valid
    return kept & (terms > 0) if positive else kept


@dataclass
class Kept:
    """Terms that are kept for some outputs.

    Attributes:
        mask: Booleans of shape (outputs, terms).
        signs: For each output, -1 if the signs of its inputs are to be flipped, otherwise 1.
        threshold: For each output, the least term that is kept; NaN if there is none.
    """

    mask: Any
    signs: Any
    threshold: Any


def keep_terms(
    terms: Any, valid: Any, outputs: Any, signs: Any, theta: float, phi: float | None
) -> Kept:
    """Keep the terms that determine each output.

    For a negative output, or a positive one that is to be flipped, these are the negative terms.

    Args:
        terms: Terms of shape (outputs, terms). Modified in place.
        valid: Which of them exist, of the same shape; None for all.
        outputs: Values of the outputs.
        signs: For each output, -1 if its sign is to be flipped, otherwise 1.
        theta: Share of the sum to keep.
        phi: Keep terms of at least this value instead; None to keep a share.
    """
    import numpy as np

    turned = np.flatnonzero(outputs * signs < 0)
    if len(turned):
        terms[turned] *= -1.0
    if phi is None:
        mask, least = _select(terms, valid, theta)
        least[~np.isfinite(least)] = np.nan
    else:
        mask = terms >= phi if valid is None else (terms >= phi) & valid
        least = np.where(mask, terms, np.inf).min(axis=1)
        least[np.isinf(least)] = np.nan
    flipped = np.ones(len(terms), np.int8)
    odd = np.flatnonzero(signs == -1)
    if len(odd):
        shown = terms[odd] if valid is None else np.where(valid[odd], terms[odd], -np.inf)
        flipped[odd[shown.max(axis=1) < 0]] = -1
    return Kept(mask, flipped, least)


@dataclass
class Covered:
    """Elements that the windows of some outputs cover.

    Attributes:
        values: Values of the elements, of shape (outputs, elements); 0 for padding.
        valid: Which of them exist, of the same shape; None for all.
        index: Returns the flat indices, in the tensor's memory layout, of the elements at these
            rows and columns of `values`.
    """

    values: Any
    valid: Any
    index: Callable[[Any, Any], Any]


class Windows:
    """Elements that each output of a convolution or pooling covers.

    Args:
        x: The input, with axes N, C and space.
        steps: Distance of neighbours in the tensor's memory layout along each axis of `x`.
        extent: Spatial sizes of the output.
        kernel: Sizes of the window.
        stride: Steps between windows.
        before: Padding before each axis; the padding after it follows from the sizes.
        dilation: Steps between the elements of a window.
        adaptive: Whether the windows divide the space evenly, as in adaptive pooling; `kernel` is
            then the largest window.
    """

    def __init__(
        self,
        x: Any,
        steps: Sequence[int],
        extent: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        before: Sequence[int],
        dilation: Sequence[int],
        adaptive: bool = False,
    ) -> None:
        import numpy as np

        space = x.shape[2:]
        widths, self._starts, self._lengths = [], [], []
        for axis, size in enumerate(space):
            if adaptive:
                places = np.arange(extent[axis])
                starts = places * size // extent[axis]
                self._lengths.append(-(-(places + 1) * size // extent[axis]) - starts)
            else:
                starts = np.arange(extent[axis]) * stride[axis]
            self._starts.append(starts)
            reach = int(starts[-1]) + (kernel[axis] - 1) * dilation[axis] + 1
            widths.append((before[axis], max(0, reach - size - before[axis])))
        self._shape = [a + size + b for size, (a, b) in zip(space, widths, strict=True)]
        inside = tuple(slice(a, a + size) for size, (a, _) in zip(space, widths, strict=True))
        padded = np.zeros((*x.shape[:2], *self._shape), x.dtype)
        own: Any = (..., *inside)
        padded[own] = x
        self._values = padded.reshape(-1)
        #: Which places exist; None for all.
        self._exists: Any = None
        if list(space) != self._shape:
            exists = np.zeros(self._shape, bool)
            exists[inside] = True
            self._exists = exists.reshape(-1)
        self._layout, self._before = list(steps), [a for a, _ in widths]
        self._steps = [math.prod(padded.shape[axis + 1 :]) for axis in range(padded.ndim)]
        self._offsets = np.stack(
            np.meshgrid(*(np.arange(size) for size in kernel), indexing="ij"), axis=-1
        ).reshape(-1, len(kernel))
        self._reach = self._offsets @ (np.asarray(dilation, int) * np.asarray(self._steps[2:], int))

    def of(self, samples: Any, channels: Any, places: Sequence[Any], depth: int = 1) -> Covered:
        """Return what the windows at these places cover.

        Args:
            samples: Sample of each output.
            channels: First input channel that each output covers.
            places: Spatial position of each output, axis by axis.
            depth: Number of input channels that a window covers.
        """
        import numpy as np

        place: Any = 0
        for axis, position in enumerate(places):
            place = place + self._starts[axis][position] * self._steps[axis + 2]
        base = samples * self._steps[0] + channels * self._steps[1] + place
        reach = (np.arange(depth)[:, None] * self._steps[1] + self._reach[None, :]).reshape(-1)
        where = base[:, None] + reach[None, :]
        values: Any = self._values.take(where)
        valid: Any = None
        if self._exists is not None:
            valid = self._exists.take(place[:, None] + self._reach[None, :])
        if self._lengths:
            inside = np.ones((len(base), len(self._reach)), bool)
            for axis, position in enumerate(places):
                inside &= self._offsets[:, axis] < self._lengths[axis][position][:, None]
            valid = inside if valid is None else inside & valid
        if valid is not None:
            valid = np.repeat(valid[:, None, :], depth, axis=1).reshape(where.shape)
        if self._lengths:
            values[~valid] = 0.0
        return Covered(values, valid, lambda rows, columns: self._index(where[rows, columns]))

    def _index(self, where: Any) -> Any:
        """Return the indices in the tensor's memory layout of elements of the padded input."""
        found: Any = 0
        for axis, step in enumerate(self._steps):
            place, where = divmod(where, step)
            found = found + (place - ([0, 0, *self._before][axis])) * self._layout[axis]
        return found
