"""Observers: the range of real values that a grid shall cover.

Owns the three rules (all values, a percentile of them, the least squared error), and the histogram
of a value that is seen piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from amanda_core.interface.groups import Group
from amanda_tools.quantize.formats import Format, Grid, affine, symmetric

__all__ = ["OBSERVERS", "Histogram", "Observer", "quantized", "weight_grid"]

Observer = Literal["minmax", "percentile", "mse"]
OBSERVERS: tuple[str, ...] = get_args(Observer)

#: Number of equally wide bins, and of ranges that are tried for the least squared error.
_BINS, _TRIED = 4096, 100


def quantized(values: Any, grid: Grid) -> Any:
    """Return an array of values after fake quantization to integers."""
    import numpy

    numbers = numpy.round(values / grid.scale) + grid.zero
    return (numpy.clip(numbers, grid.lowest, grid.highest) - grid.zero) * grid.scale


def weight_grid(
    values: Any,
    axes: Sequence[int],
    form: Format,
    observer: str,
    percentile: float,
    has_zero: bool = False,
) -> Grid:
    """Return the grid of a weight.

    Args:
        values: The weight as an array.
        axes: The axes whose elements share a scale; the scale has size 1 there.
        form: The number format.
        observer: One of `OBSERVERS`.
        percentile: How many of 100 magnitudes lie in the range, for the observer of that name; of a
            grid with a zero point, how many of 100 values.
        has_zero: Whether it has a zero point, and is not symmetric.
    """
    import numpy

    if has_zero and not form.float8:
        return _affine_grid(values, tuple(axes), form, observer, percentile)
    magnitudes = numpy.abs(values.astype(numpy.float32))
    magnitudes = numpy.where(numpy.isfinite(magnitudes), magnitudes, numpy.float32(0))
    axes = tuple(axes)
    largest = magnitudes.max(axis=axes, keepdims=True, initial=0.0)
    if observer == "percentile" and magnitudes.size:
        largest = numpy.percentile(magnitudes, percentile, axis=axes, keepdims=True)
    elif observer == "mse" and not form.float8:
        best, least = largest, numpy.full(largest.shape, numpy.inf)
        for share in range(1, _TRIED + 1):
            tried = largest * numpy.float32(share / _TRIED)
            error = quantized(magnitudes, symmetric(form, tried)) - magnitudes
            squared = (error.astype(numpy.float64) ** 2).sum(axis=axes, keepdims=True)
            best, least = (
                numpy.where(squared <= least, tried, best),
                numpy.minimum(squared, least),
            )
        largest = best
    return symmetric(form, largest)


def _affine_grid(
    values: Any, axes: tuple[int, ...], form: Format, observer: str, percentile: float
) -> Grid:
    import numpy

    known = values.astype(numpy.float32)
    known = numpy.where(numpy.isfinite(known), known, numpy.float32(0))
    low = known.min(axis=axes, keepdims=True, initial=0.0)
    high = known.max(axis=axes, keepdims=True, initial=0.0)
    if observer == "percentile" and known.size:
        outside = (100 - percentile) / 2
        low, high = numpy.percentile(known, (outside, 100 - outside), axis=axes, keepdims=True)
    if observer != "mse":
        return affine(form, low, high)
    best, least = numpy.ones(low.shape, numpy.float32), numpy.full(low.shape, numpy.inf)
    for tried in range(1, _TRIED + 1):
        share = numpy.float32(tried / _TRIED)
        error = quantized(known, affine(form, low * share, high * share)) - known
        squared = (error.astype(numpy.float64) ** 2).sum(axis=axes, keepdims=True)
        best = numpy.where(squared <= least, share, best)
        least = numpy.minimum(squared, least)
    return affine(form, low * best, high * best)


class Histogram:
    """Range and distribution of values that are seen piece by piece.

    The bins cover an interval around 0 of a power of two. It doubles if a value lies outside, and
    then pairs of bins become one, so that no count is ever estimated.

    Attributes:
        seen: In how many runs of the program values were added; the caller counts them.
        low: Smallest finite value.
        high: Largest finite value.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.low, self.high = math.inf, -math.inf
        self._limit = 0.0
        self._histogram: Any = None

    def add(self, values: Any, counting: bool) -> bool:
        """Add an array of values; return False if they tell nothing about a range.

        That is so if none of them is finite, and if all are zeros, as a first state is.

        Args:
            values: The array.
            counting: Whether the distribution is needed as well.
        """
        import numpy

        values = values[numpy.isfinite(values)]
        if not values.size:
            return False
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        if counting:
            self._count(values)
        return bool(values.any())

    @property
    def tells(self) -> bool:
        """True if there were finite values, and not all of them are zeros."""
        return self.low <= self.high and (self.low, self.high) != (0.0, 0.0)

    def share(self, group: Group, what: str, counting: bool, flag: bool = False) -> bool:
        """Add the values that the other processes of a group have seen.

        Args:
            group: The processes.
            what: Whose values they are.
            counting: Whether the distribution is needed as well.
            flag: What another process may know of the values besides.

        Returns:
            Whether `flag` is true in one of them.

        Raises:
            UnsupportedError: A process has not come here.
        """
        import numpy

        ends = numpy.array([-self.low, self.high, self._limit, flag])
        ends = group.agree(f"{what}, seen {self.seen} times", {"ends": ends}, "max")["ends"]
        self.low, self.high = -float(ends[0]), float(ends[1])
        if counting and self.tells:
            self._widen(float(ends[2]))
            self._histogram = group.agree(what, {"counts": self._histogram}, "sum")["counts"]
        return bool(ends[3])

    def grid(self, form: Format, observer: str, percentile: float, around_zero: bool) -> Grid:
        """Return the grid of the values so far.

        Args:
            form: The number format.
            observer: One of `OBSERVERS`.
            percentile: How many of 100 values lie in the range, for the observer of that name.
            around_zero: Whether the grid is symmetric.
        """

        def made(low: float, high: float) -> Grid:
            if around_zero:
                return symmetric(form, max(abs(low), abs(high)))
            return affine(form, low, high)

        if self.low > self.high:
            return made(0.0, 0.0)
        if observer == "percentile":
            return made(*self._central(percentile))
        if observer == "mse" and not form.float8:
            return self._least(made)
        return made(self.low, self.high)

    def _count(self, values: Any) -> None:
        import numpy

        reach = max(abs(self.low), abs(self.high))
        self._widen(2.0 ** math.frexp(reach)[1] if reach else 1.0)
        span = (-self._limit, self._limit)
        self._histogram += numpy.histogram(values.astype(numpy.float64), _BINS, span)[0]

    def _widen(self, limit: float) -> None:
        """Let the bins reach as far as a power of two."""
        import numpy

        if self._histogram is None:
            self._limit, self._histogram = limit, numpy.zeros(_BINS, numpy.int64)
        while self._limit < limit:
            inner = self._histogram.reshape(-1, 2).sum(1)
            self._histogram = numpy.pad(inner, _BINS // 4)
            self._limit *= 2

    def _central(self, percentile: float) -> tuple[float, float]:
        """Return the range without the same share of values at each end."""
        import numpy

        running = numpy.cumsum(self._histogram)
        total, outside = running[-1], (1 - percentile / 100) / 2
        edges = numpy.linspace(-self._limit, self._limit, _BINS + 1)
        first = int(numpy.searchsorted(running, outside * total, "right"))
        last = int(numpy.searchsorted(running, (1 - outside) * total, "left"))
        low, high = float(edges[first]), float(edges[min(last, _BINS - 1) + 1])
        return max(low, self.low), min(high, self.high)

    def _least(self, made: Any) -> Grid:
        """Return the grid with the least squared error among shrunk ranges."""
        import numpy

        filled = numpy.nonzero(self._histogram)[0]
        counts = self._histogram[filled]
        centres = (filled + 0.5) * (2 * self._limit / _BINS) - self._limit
        best: Grid = made(self.low, self.high)
        least = math.inf
        for share in range(1, _TRIED + 1):
            grid = made(self.low * share / _TRIED, self.high * share / _TRIED)
            error = float((counts * (quantized(centres, grid) - centres) ** 2).sum())
            if error <= least:
                best, least = grid, error
        return best

    def to_json(self) -> dict[str, Any]:
        """Return what is needed to continue in another process."""
        counts = [] if self._histogram is None else self._histogram.tolist()
        ends = [self.low, self.high] if self.low <= self.high else []
        return {"seen": self.seen, "ends": ends, "limit": self._limit, "counts": counts}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Histogram:
        """Return the histogram of a `to_json`."""
        import numpy

        found = cls()
        found.seen, found._limit = state["seen"], state["limit"]
        if state["ends"]:
            found.low, found.high = state["ends"]
        if state["counts"]:
            found._histogram = numpy.asarray(state["counts"], numpy.int64)
        return found
