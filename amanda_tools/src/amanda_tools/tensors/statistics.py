"""What numbers say of a tensor: counts, extremes, moments, a histogram.

Owns these figures. They are those of the finite elements; what is not finite is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from amanda_tools.tensors.values import HostTensor, numbers

__all__ = ["Statistics", "statistics_of"]


@dataclass
class Statistics:
    """Figures of one tensor.

    Attributes:
        count: Elements.
        nan: Those that are no number.
        inf: Those that are infinite.
        zeros: Those that are zero.
        min: Smallest finite element; None if there is none, as for the figures below.
        max: Largest.
        mean: Mean.
        std: Standard deviation, that of the elements and not an estimate.
        norm: Root of the sum of squares.
        histogram: How many finite elements lie in each of equal bins from `min` to `max`, or around
            it where there is only one value; empty if not asked for.
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
    """The figures of a tensor; complex elements are taken by their magnitude.

    Args:
        tensor: The tensor.
        bins: Bins of the histogram, 0 for none.
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
    # Divided by a power of two, which is exact, so that squares do not overflow.
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
    # JSON has no infinity; a norm can overflow where its elements do not.
    return value if value < float("inf") else None
