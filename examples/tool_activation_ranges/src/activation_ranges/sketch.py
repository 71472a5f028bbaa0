"""A histogram of numbers of any magnitude in little memory, built up as they come.

Owns the buckets: each power of two, of either sign, is divided into 64. A bucket is so narrow that
its values differ by less than 1/64 of themselves; that is the precision of percentiles. Nothing
has to be known of the range before, and sketches of parts need no common bins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Sketch"]

Floats = npt.NDArray[np.float64]

_PARTS = 64
#: Below the exponent of the smallest number, so that all buckets but that of zero are positive.
_LOWEST = -1100


class Sketch:
    """Counts of finite numbers.

    >>> sketch = Sketch()
    >>> sketch.add(np.arange(1001.0))
    >>> abs(sketch.percentiles([50.0], 0.0, 1000.0)[0] - 500.0) < 500 / 64
    True
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    @property
    def total(self) -> int:
        """How many numbers were added."""
        return self._counts.total()

    @property
    def zeros(self) -> int:
        """How many of them were 0."""
        return self._counts[0]

    def add(self, values: Floats) -> None:
        """Add finite numbers; `values` has any shape."""
        if not values.size:
            return
        mantissa, exponent = np.frexp(np.abs(values.ravel()))
        part = ((mantissa - 0.5) * (2 * _PARTS)).astype(np.int64)
        buckets = np.where(mantissa > 0, (exponent - _LOWEST) * _PARTS + part, 0)
        buckets = np.where(values.ravel() < 0, -buckets, buckets)
        lowest = int(buckets.min())
        counts = np.bincount(buckets - lowest)
        for place in np.flatnonzero(counts):
            self._counts[int(place) + lowest] += int(counts[place])

    def percentiles(self, wanted: Sequence[float], lowest: float, highest: float) -> list[float]:
        """Estimates of percentiles (0 to 100), of numbers known to lie between the two others."""
        places, below = self._cumulated(lowest, highest)
        found = np.interp(np.asarray(wanted) / 100 * self.total, below, places)
        return [float(value) for value in found]

    def histogram(self, bins: int, lowest: float, highest: float) -> tuple[Floats, Floats]:
        """Counts in bins of equal width between the smallest and the largest number.

        Returns:
            Edges, one more than bins, and counts, which are estimates and add up to `total`. Both
            are empty where the range is too wide for the width of a bin to be a number.
        """
        with np.errstate(over="ignore"):
            width = np.float64(highest) - np.float64(lowest)
        if not self.total or not np.isfinite(width):
            return np.empty(0), np.empty(0)
        if width == 0:
            return np.array([lowest, highest]), np.array([float(self.total)])
        places, below = self._cumulated(lowest, highest)
        edges = np.linspace(lowest, highest, bins + 1)
        reached = np.interp(edges, places, below)
        # What is exactly at the ends is inside.
        reached[0], reached[-1] = 0, self.total
        return edges, np.diff(reached)

    def _cumulated(self, lowest: float, highest: float) -> tuple[Floats, Floats]:
        """Both ends of each bucket, and how many numbers lie below them."""
        buckets = np.array(sorted(self._counts), np.int64)
        sizes = np.array([self._counts[int(bucket)] for bucket in buckets], np.float64)
        power, part = np.divmod(np.abs(buckets), _PARTS)
        with np.errstate(over="ignore"):
            near = np.ldexp(0.5 + part / (2 * _PARTS), power + _LOWEST)
            far = np.ldexp(0.5 + (part + 1) / (2 * _PARTS), power + _LOWEST)
        near, far = np.where(buckets == 0, 0.0, near), np.where(buckets == 0, 0.0, far)
        ends = np.where(buckets < 0, [-far, -near], [near, far])
        upto = np.cumsum(sizes)
        below = np.stack([upto - sizes, upto])
        return np.clip(ends.T.ravel(), lowest, highest), below.T.ravel()
