"""How far scores are from others: the Kullback-Leibler divergence of their softmax."""

from __future__ import annotations

from typing import Any

__all__ = ["divergence"]


def divergence(scores: Any, others: Any, axis: int = -1) -> float:
    """Return the divergence of the distribution of other scores from that of scores.

    Args:
        scores: An array of logarithms of probabilities, up to a constant.
        others: An array of the same shape.
        axis: The axis of the classes.

    Returns:
        The mean over the other axes, in nats: ``sum(p * log(p / q))``.

    >>> import numpy
    >>> round(divergence(numpy.zeros(2), numpy.log([0.25, 0.75])), 4)
    0.1438
    """
    import numpy

    with numpy.errstate(all="ignore"):
        real, other = (_log_softmax(one, axis) for one in (scores, others))
        # What has no probability adds nothing.
        terms = numpy.where(real > -numpy.inf, numpy.exp(real) * (real - other), 0.0)
    return float(terms.sum(axis).mean())


def _log_softmax(scores: Any, axis: int) -> Any:
    import numpy

    shifted = scores - scores.max(axis, keepdims=True)
    return shifted - numpy.log(numpy.exp(shifted).sum(axis, keepdims=True))
