"""Which contributions to an output are kept: the selection of effective paths.

Owns the choice among the terms of a sum and the elements that a window covers. Works on NumPy
arrays, many outputs at once; NumPy is imported when it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Covered", "Kept", "Windows", "chunks", "cumulative", "keep_terms", "maximal"]

#: Terms that are looked at together, which bounds the memory: a few arrays of 8 bytes a term.
_TERMS = 1 << 21


def chunks(rows: int, terms: int) -> Iterator[slice]:
    """Parts of so many rows of so many terms that fit into memory together."""
    size = max(1, _TERMS // max(1, terms))
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def cumulative(terms: Any, valid: Any, theta: float) -> Any:
    """Keep the largest terms of each row that make up a share of its sum.

    The shortest prefix of the terms in descending order whose sum is at least `theta` of the whole;
    of equal terms the first. The largest term alone where the sum is not positive, or one term is
    a share of at least `theta` by its number.

    Args:
        terms: Of shape (rows, terms).
        valid: Which of them exist, of the same shape; None for all.
        theta: The share, above 0 and at most 1.

    Returns:
        Truth values of the shape of `terms`.
    """
    import numpy as np

    shown = terms if valid is None else np.where(valid, terms, -np.inf)
    order = np.argsort(-shown, axis=1, kind="stable")
    ordered = np.take_along_axis(shown, order, axis=1)
    if valid is not None:
        ordered[np.isneginf(ordered)] = 0.0
    sums = ordered.cumsum(axis=1)
    total = terms.sum(axis=1) if valid is None else np.where(valid, terms, 0.0).sum(axis=1)
    # The sums rise to a peak and then fall, never below the whole: the first that is large enough
    # comes behind all that are too small.
    count = (sums < (theta * total)[:, None]).sum(axis=1) + 1
    # By rounding, no sum may be large enough.
    count = np.where(count > terms.shape[1], (shown > 0).sum(axis=1), count)
    number = terms.shape[1] if valid is None else valid.sum(axis=1)
    with np.errstate(divide="ignore"):
        count = np.where((total <= 0) | (1 / np.asarray(number) >= theta), 1, count)
    kept = np.zeros(terms.shape, bool)
    np.put_along_axis(kept, order, np.arange(terms.shape[1]) < count[:, None], axis=1)
    return kept if valid is None else kept & valid


def maximal(terms: Any, valid: Any, positive: bool) -> Any:
    """Keep the terms of each row that are its maximum; with `positive`, only if it is above 0."""
    import numpy as np

    shown = terms if valid is None else np.where(valid, terms, -np.inf)
    kept = shown == shown.max(axis=1, keepdims=True)
    if valid is not None:
        kept &= valid
    return kept & (terms > 0) if positive else kept


@dataclass
class Kept:
    """What is kept of the terms of some outputs.

    Attributes:
        mask: Truth values, of shape (outputs, terms).
        signs: For each output, -1 where its inputs' signs are to be flipped, else 1.
        threshold: For each output, the least term that is kept; NaN if there is none.
    """

    mask: Any
    signs: Any
    threshold: Any


def keep_terms(
    terms: Any, valid: Any, outputs: Any, signs: Any, theta: float, phi: float | None
) -> Kept:
    """Keep the terms that bring an output about.

    Of an output that is negative, or positive and to be flipped, these are the negative terms.

    Args:
        terms: Of shape (outputs, terms). Changed in place.
        valid: Which of them exist, of the same shape; None for all.
        outputs: The values of the outputs.
        signs: For each, -1 where its sign is to be flipped, else 1.
        theta: Share of the sum that is kept.
        phi: Keep the terms of at least this instead; None for a share.
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
    """What the windows of some outputs cover.

    Attributes:
        values: Values of the elements, of shape (outputs, elements); 0 for padding.
        indices: Flat indices of the elements in the tensor as it is laid out; -1 for padding.
    """

    values: Any
    indices: Any


class Windows:
    """The elements that each output of a convolution or pooling covers.

    Args:
        x: The input, of axes N, C and space.
        indices: Flat index of each element of `x` in the tensor as it is laid out.
        extent: Sizes of the output's space.
        kernel: Sizes of the window.
        stride: Steps between windows.
        before: Padding in front of each axis; what is needed behind follows from the sizes.
        dilation: Steps between the elements of a window.
        adaptive: Whether the windows divide the space evenly, as adaptive pooling has them; the
            kernel is the largest of them.
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
            samples: Number of the sample of each output.
            channels: The first input channel that it covers.
            places: Its place in the output's space, axis by axis.
            depth: Input channels that a window covers.
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
