"""Statistics of a tensor: counts, extremes, moments and a histogram.

Extremes, moments and the histogram cover the finite elements. NaNs and infinities are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from amanda_tools.tensors.values import HostTensor, numbers

__all__ = ["Statistics", "statistics_of"]


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
    """
    import numpy

    values = numbers(tensor.array, tensor.dtype)
    nan, inf = int(numpy.isnan(values).sum()), int(numpy.isinf(values).sum())
    zeros = int((values == 0).sum())
    finite = values[numpy.isfinite(values)] if nan or inf else values.ravel()
    if not finite.size:
        return Statistics(values.size, nan, inf, zeros, None, None, None, None, None, [])
    finite = (numpy.abs(finite) if finite.dtype.kind == "c" else finite).astype(numpy.float64)
    low, high = float(finite.min()), float(finite.max())
    # Divide by a power of two, which is exact, so that squares do not overflow.
    scale = 2.0 ** (math.frexp(max(abs(low), abs(high)))[1] - 1)
    scaled = finite / scale
    histogram = numpy.histogram(scaled, bins)[0].tolist() if bins else []
    return Statistics(
        values.size,
        nan,
        inf,
        zeros,
        low,
        high,
        float(scaled.mean() * scale),
        float(scaled.std() * scale),
        _number(float(numpy.sqrt((scaled * scaled).sum())) * scale),
        histogram,
    )


def _number(value: float) -> float | None:
    # JSON has no infinity, and a norm can overflow although its elements are finite.
    return value if value < float("inf") else None
