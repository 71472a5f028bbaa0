"""Histogram of numbers of any magnitude in little memory, built incrementally.

Each power of two, of either sign, is divided into 64 buckets. The values in a bucket differ by less
than 1/64, which is the precision of percentiles. The range need not be known in advance, and memory
grows only with the powers of two that occur.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "Sketch"]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_PARTS = 64


class _Side:
    """Counts of positive numbers, for the buckets from the lowest to the highest that occurs."""

    def __init__(self) -> None:
        self.lowest = 0
        self.counts: Counts = np.zeros(0, np.int64)

    def add(self, values: Floats) -> None:
        if not values.size:
            return
        mantissa, exponent = np.frexp(values)
        buckets = exponent * _PARTS + ((mantissa - 0.5) * (2 * _PARTS)).astype(np.int64)
        lowest = int(buckets.min())
        counts = np.bincount(buckets - lowest)
        if not self.counts.size:
            self.lowest = lowest
        self._reach(lowest, lowest + counts.size)
        self.counts[lowest - self.lowest :][: counts.size] += counts

    def _reach(self, lowest: int, end: int) -> None:
        ahead = max(0, self.lowest - lowest)
        behind = max(0, end - self.lowest - self.counts.size)
        if ahead or behind:
            self.counts = np.pad(self.counts, (ahead, behind))
            self.lowest -= ahead

    def ends(self) -> tuple[Floats, Floats, Counts]:
        """Return the start, the end and the count of each bucket that occurs."""
        (places,) = np.nonzero(self.counts)
        power, part = np.divmod(places + self.lowest, _PARTS)
        with np.errstate(over="ignore"):
            near = np.ldexp(0.5 + part / (2 * _PARTS), power)
            far = np.ldexp(0.5 + (part + 1) / (2 * _PARTS), power)
        return near, far, self.counts[places]


class Sketch:
    """Counts of finite numbers.

    >>> sketch = Sketch()
    >>> sketch.add(np.arange(1001.0))
    >>> abs(sketch.percentiles([50.0], 0.0, 1000.0)[0] - 500.0) < 500 / 64
    True

    Attributes:
        total: Number of numbers that were added.
        zeros: Number of zeros among them.
    """

    def __init__(self) -> None:
        self.total = 0
        self.zeros = 0
        self._below, self._above = _Side(), _Side()

    @property
    def nbytes(self) -> int:
        """Return the size of the counts in bytes."""
        return self._below.counts.nbytes + self._above.counts.nbytes

    def add(self, values: Floats) -> None:
        """Add finite numbers; `values` has any shape."""
        flat = values.ravel()
        below, above = -flat[flat < 0], flat[flat > 0]
        self._below.add(below)
        self._above.add(above)
        self.total += flat.size
        self.zeros += flat.size - below.size - above.size

    def percentiles(self, wanted: Sequence[float], lowest: float, highest: float) -> list[float]:
        """Estimate percentiles (0 to 100) of numbers that lie between `lowest` and `highest`."""
        places, reached = self._cumulated(lowest, highest)
        found = np.interp(np.asarray(wanted) / 100 * self.total, reached, places)
        return [float(value) for value in found]

    def histogram(self, bins: int, lowest: float, highest: float) -> tuple[Floats, Floats]:
        """Count numbers in bins of equal width between `lowest` and `highest`.

        Returns:
            Edges, one more than bins, and counts, which are estimates and add up to `total`. Both
            are empty if the width of a bin is not representable.
        """
        with np.errstate(over="ignore"):
            width = np.float64(highest) - np.float64(lowest)
        if not self.total or not np.isfinite(width):
            return np.empty(0), np.empty(0)
        if width == 0:
            return np.array([lowest, highest]), np.array([float(self.total)])
        places, reached = self._cumulated(lowest, highest)
        edges = np.linspace(lowest, highest, bins + 1)
        upto = np.interp(edges, places, reached)
        # Values exactly at the ends are inside.
        upto[0], upto[-1] = 0, self.total
        return edges, np.diff(upto)

    def _cumulated(self, lowest: float, highest: float) -> tuple[Floats, Floats]:
        """Return both ends of each bucket, in order, and the number of numbers below each."""
        near, far, counts = self._below.ends()
        # Below zero, values nearer to zero come later.
        starts, ends, sizes = [-far[::-1]], [-near[::-1]], [counts[::-1]]
        if self.zeros:
            starts.append(np.zeros(1))
            ends.append(np.zeros(1))
            sizes.append(np.array([self.zeros]))
        near, far, counts = self._above.ends()
        starts.append(near)
        ends.append(far)
        sizes.append(counts)
        size = np.concatenate(sizes).astype(np.float64)
        upto = np.cumsum(size)
        places = np.stack([np.concatenate(starts), np.concatenate(ends)], axis=1).ravel()
        reached = np.stack([upto - size, upto], axis=1).ravel()
        return np.clip(places, lowest, highest), reached
