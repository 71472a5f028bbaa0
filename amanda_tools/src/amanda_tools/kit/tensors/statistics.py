"""Statistics of a tensor: counts, extremes, moments and a histogram.

Extremes, moments and the histogram cover the finite elements. NaNs and infinities are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from amanda_tools.kit.tensors.values import HostTensor, numbers

__all__ = ["PART", "Statistics", "statistics_of"]

#: Number of elements that are looked at at once.
PART = 1 << 24
#: Up to this number of bins, one comparison with each bound is faster than to find the bin of each
#: element.
_FEW_BINS = 32


@dataclass
class Statistics:
    """Statistics of one tensor.

    Attributes:
        count: Number of elements.
        nan: Number of NaNs.
        inf: Number of infinite elements.
        zeros: Number of zeros.
        min: Smallest finite element. This and the figures below are None if there is no finite
            element.
        max: Largest finite element.
        mean: Mean.
        std: Standard deviation of the elements (the population's, not an estimate).
        norm: Euclidean norm.
        histogram: Number of finite elements in each of equally wide bins from `min` to `max`. With
            a single distinct value the bins lie around it. Empty if not requested.

    >>> import numpy
    >>> statistics_of(HostTensor(numpy.asarray([0.0, numpy.nan]), "float64")).nan
    1
    """

    count: int
    nan: int
    inf: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float | None
    histogram: list[int]


def statistics_of(tensor: HostTensor, bins: int = 0) -> Statistics:
    """Compute the statistics of a tensor; complex elements count by their magnitude.

    Args:
        tensor: The tensor.
        bins: Number of bins of the histogram; 0 for no histogram.

    >>> import numpy
    >>> statistics_of(HostTensor(numpy.asarray([0.0, 3.0, 4.0]), "float64")).norm
    5.0
    """
    import numpy

    values = numbers(tensor.array, tensor.dtype).ravel()
    parts = [values[first : first + PART] for first in range(0, values.size, PART)]
    nan = inf = zeros = 0
    for part in parts:
        zeros += int(numpy.count_nonzero(part == 0))
        if numpy.count_nonzero(numpy.isfinite(part)) != part.size:
            nan += int(numpy.count_nonzero(numpy.isnan(part)))
            inf += int(numpy.count_nonzero(numpy.isinf(part)))
    count = values.size - nan - inf
    if not count:
        return Statistics(values.size, nan, inf, zeros, None, None, None, None, None, [])

    def finite(part: Any) -> Any:
        found = part[numpy.isfinite(part)] if nan or inf else part
        return (numpy.abs(found) if found.dtype.kind == "c" else found).astype(numpy.float64)

    # Those of several parts are made again each time, as they take up to eight times the memory.
    kept = [finite(parts[0])] if len(parts) == 1 else None

    def over(compute: Callable[[Any], Any]) -> list[Any]:
        return [compute(part) for part in kept or map(finite, parts) if part.size]

    # Methods of arrays call these in Python.
    lowest, highest, add = numpy.minimum.reduce, numpy.maximum.reduce, numpy.add.reduce
    extremes = over(lambda part: (float(lowest(part)), float(highest(part))))
    low, high = min(low for low, _ in extremes), max(high for _, high in extremes)
    # Divide by a power of two, which is exact, so that squares do not overflow.
    scale = 2.0 ** (math.frexp(max(abs(low), abs(high)))[1] - 1)
    if kept:
        kept[0] /= scale

    def scaled(compute: Callable[[Any], Any]) -> list[Any]:
        return over(compute if kept else lambda part: compute(part / scale))

    # Count from the smallest on if that is exact: NumPy refuses bins that are narrower than the
    # distance of neighbouring numbers.
    start = low / scale if high - low <= min(abs(low), abs(high)) else 0.0
    bounds = low / scale - start, high / scale - start
    histograms = (
        scaled(lambda part: _histogram(part - start if start else part, bins, *bounds))
        if bins
        else []
    )
    mean = sum(scaled(add)) / count
    squares = sum(scaled(lambda part: add(numpy.square(part))))
    deviations = sum(scaled(lambda part: add(numpy.square(part - mean))))
    return Statistics(
        values.size,
        nan,
        inf,
        zeros,
        low,
        high,
        float(mean * scale),
        float(numpy.sqrt(deviations / count) * scale),
        _number(float(numpy.sqrt(squares)) * scale),
        [sum(numbers) for numbers in zip(*histograms, strict=True)],
    )


def _histogram(values: Any, bins: int, low: float, high: float) -> list[int]:
    """Return ``numpy.histogram(values, bins, (low, high))[0]`` in fewer steps if there are few
    bins.
    """
    import numpy

    if bins > _FEW_BINS or not low < high:
        found: list[int] = numpy.histogram(values, bins, (low, high))[0].tolist()
        return found
    step = (high - low) / bins
    inner = [numpy.count_nonzero(values >= number * step + low) for number in range(1, bins)]
    above = [values.size, *inner, 0]
    return [int(one - other) for one, other in pairwise(above)]


def _number(value: float) -> float | None:
    # JSON has no infinity, and a norm can overflow although its elements are finite.
    return value if value < float("inf") else None
