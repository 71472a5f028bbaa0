"""Selection of the contributions to an output, for effective paths.

Selects among the terms of a sum and the elements that a window covers. Works on NumPy arrays, many
outputs at once. NumPy is imported only when needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Covered", "Kept", "Windows", "chunks", "cumulative", "keep_terms", "maximal"]

#: Number of terms per chunk, which bounds the memory: a few arrays of 8 bytes per term.
_TERMS = 1 << 21


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

    shown = terms if valid is None else np.where(valid, terms, -np.inf)
    order = np.argsort(-shown, axis=1, kind="stable")
    ordered = np.take_along_axis(shown, order, axis=1)
    if valid is not None:
        ordered[np.isneginf(ordered)] = 0.0
    sums = ordered.cumsum(axis=1)
    total = terms.sum(axis=1) if valid is None else np.where(valid, terms, 0.0).sum(axis=1)
    # The sums rise to a peak and then fall, never below the whole, so the first that is large
    # enough comes after all that are too small.
    count = (sums < (theta * total)[:, None]).sum(axis=1) + 1
    # Because of rounding, possibly no sum is large enough.
    count = np.where(count > terms.shape[1], (shown > 0).sum(axis=1), count)
    number = terms.shape[1] if valid is None else valid.sum(axis=1)
    with np.errstate(divide="ignore"):
        count = np.where((total <= 0) | (1 / np.asarray(number) >= theta), 1, count)
    kept = np.zeros(terms.shape, bool)
    np.put_along_axis(kept, order, np.arange(terms.shape[1]) < count[:, None], axis=1)
    return kept if valid is None else kept & valid


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

    terms[outputs * signs < 0] *= -1.0
    shown = terms if valid is None else np.where(valid, terms, -np.inf)
    mask = cumulative(terms, valid, theta) if phi is None else shown >= phi
    flipped = np.where((signs == -1) & (shown.max(axis=1) < 0), -1, 1)
    least = np.where(mask, terms, np.inf).min(axis=1)
    return Kept(mask, flipped, np.where(np.isinf(least), np.nan, least))


@dataclass
class Covered:
    """Elements that the windows of some outputs cover.

    Attributes:
        values: Values of the elements, of shape (outputs, elements); 0 for padding.
        indices: Flat indices of the elements in the tensor's memory layout; -1 for padding.
    """

    values: Any
    indices: Any


class Windows:
    """Elements that each output of a convolution or pooling covers.

    Args:
        x: The input, with axes N, C and space.
        indices: Flat index of each element of `x` in the tensor's memory layout.
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
        indices: Any,
        extent: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        before: Sequence[int],
        dilation: Sequence[int],
        adaptive: bool = False,
    ) -> None:
        import numpy as np

        space = x.shape[2:]
        widths, self._starts, self._lengths = [(0, 0), (0, 0)], [], []
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
        self._values = np.pad(x, widths).reshape(-1)
        padded = np.pad(indices, widths, constant_values=-1)
        self._indices = padded.reshape(-1)
        self._channels = x.shape[1]
        self._steps = [int(math.prod(padded.shape[axis + 1 :])) for axis in range(padded.ndim)]
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

        base = samples * self._steps[0] + channels * self._steps[1]
        for axis, place in enumerate(places):
            base = base + self._starts[axis][place] * self._steps[axis + 2]
        reach = (np.arange(depth)[:, None] * self._steps[1] + self._reach[None, :]).reshape(-1)
        where = base[:, None] + reach[None, :]
        values, indices = self._values[where], self._indices[where]
        if self._lengths:
            inside = np.ones(where.shape, bool)
            for axis, place in enumerate(places):
                offsets = np.tile(self._offsets[:, axis], depth)
                inside &= offsets[None, :] < self._lengths[axis][place][:, None]
            indices = np.where(inside, indices, -1)
        return Covered(values, indices)
