"""What kind of mistake makes two implementations differ, as far as their values show it.

Each check is of one fact about the two values that differ first, such as that one is a multiple of
the other. Nothing is said if none holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_tools.diff.numbers import epsilon, orders

__all__ = ["Evidence", "kind_of"]

#: Relative difference up to which values count as equal here.
_CLOSE = 1e-4
_WITH_KERNEL = {"linear", "matmul", "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose2d"}
_WITH_BIAS = _WITH_KERNEL | {
    *("add", "attention", "layer_norm", "batch_norm", "group_norm", "instance_norm"),
}


@dataclass(frozen=True)
class Evidence:
    """The values that differ first, in float64 and in one order of axes.

    Attributes:
        word: Common type of the operator that makes the difference.
        values: Both results; None if their shapes do not fit.
        read: What the operator of the first run read.
        weights: Pairs of weights of the same number of elements.
        layouts: Layouts of both operators' weights.
        dtypes: Floating-point dtypes with which each run computes here.
        has: Returns True if the second run has values such as these.
        has_rotated: Returns True if it has other values of the same length as one that the first
            run computed here.
    """

    word: str | None
    values: tuple[Any, Any] | None
    read: Any | None
    weights: Sequence[tuple[Any, Any]]
    layouts: tuple[str | None, str | None]
    dtypes: tuple[set[str], set[str]]
    has: Callable[[Any], bool]
    has_rotated: Callable[[], bool]


def kind_of(evidence: Evidence) -> str | None:
    """Return what kind of mistake the values show, in a sentence that begins with its name."""
    return next((text for check in _CHECKS if (text := check(evidence))), None)


def _dtype(given: Evidence) -> str | None:
    mine, theirs = (
        {name for name in names if "complex" not in name and epsilon(name) is not None}
        for names in given.dtypes
    )
    if mine and theirs and mine != theirs:
        texts = (" and ".join(sorted(names)) for names in (mine, theirs))
        return "dtype: A computes in {}, and B in {}".format(*texts)
    return None


def _activation(given: Evidence) -> str | None:
    if given.word not in _ACTIVATIONS or given.read is None:
        return None
    for name, function in _ACTIVATIONS.items():
        if name != given.word and given.has(function(given.read)):
            return f"activation: B computes {name}, and A {given.word}"
    return None


def _transposed(given: Evidence) -> str | None:
    import numpy

    for one, other in given.weights if given.word in _WITH_KERNEL else ():
        if one.ndim < 2 or not _near(numpy.sort(one, None), numpy.sort(other, None)):
            continue
        if one.ndim == 2 and one.shape[0] == one.shape[1]:
            if given.values is None or given.read is None or given.read.shape[-1] != len(one):
                continue
            right, wrong = given.read @ one.T, given.read @ one
            for products in (right, wrong), (wrong, right):
                if not _near(*products) and all(map(_is_biased, given.values, products)):
                    return "kernel: B multiplies by the transposed matrix"
        elif not _is_same_kernel(one, other, given):
            return "kernel: B's has the same elements in another order"
    return None


def _is_same_kernel(one: Any, other: Any, given: Evidence) -> bool:
    known = [*orders(one.shape, other.shape, given.layouts)]
    depthwise = (2, 3, 0, 1)
    if one.ndim == 4 and one.shape[1] == 1 and other.transpose(depthwise).shape == one.shape:
        known = [depthwise]
    return any(_near(one, other.transpose(order)) for order in known)


def _bias(given: Evidence) -> str | None:
    if given.word not in _WITH_BIAS or given.values is None or given.values[0].ndim < 2:
        return None
    one, other = given.values
    if given.word == "add" and one.shape[-1] == 1:
        return None  # One number for each group, of which each would have the same bias.
    apart = other - one
    varies = [axis for axis in range(apart.ndim) if not _is_constant(apart, axis, one)]
    if apart.any() and 0 not in varies and len(varies) < apart.ndim - (apart.ndim > 2):
        return "bias: B differs by constants, as if one lacked a bias"
    return None


def _scale(given: Evidence) -> str | None:
    if given.values is None:
        return None
    one, other = (values.ravel() for values in given.values)
    factor = (one @ other) / ((one @ one) or 1.0)
    if factor and _near(factor * one, other) and abs(factor - 1) > _CLOSE:
        return f"scale: B is {factor:.6g} times A"
    return None


def _epsilon(given: Evidence) -> str | None:
    """Look for groups of values that are scaled by other factors, all on one side of 1, or for
    their variances, to which another number is added.
    """
    if given.values is None:
        return None
    one, other = given.values
    if given.word == "add" and one.ndim > 1 and one.shape[-1] == 1 and one.size > 1:
        more = float((other - one).mean())
        if more and float(one.std()) and _near(one + more, other):
            return f"epsilon: B adds {more:.6g} more to one number of each group"
    for one, other in _groups(*given.values):
        centred, theirs = (part - part.mean(1, keepdims=True) for part in (one, other))
        for x, y in ((one, other), (centred, theirs)):
            squares = (x * x).sum(1)
            known = squares > 1e-12 * squares.max()
            factors = (x * y).sum(1)[known] / squares[known]
            if not len(factors) or not _near(factors[:, None] * x[known], y[known]):
                continue
            away = abs(factors - 1) > 1e-7
            if (
                away.any()
                and min(factors) > 0.5
                and max(factors) < 2
                and len({one > 1 for one in factors[away]}) == 1
            ):
                return (
                    "epsilon: B scales each normalized group by another factor, from "
                    f"{min(factors):.6g} to {max(factors):.6g}"
                )
    return None


def _groups(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yield values as groups that a normalization may have scaled as one."""
    if one.ndim >= 2 and one.shape[-1] > 2:
        yield one.reshape(-1, one.shape[-1]), other.reshape(-1, one.shape[-1])
    if one.ndim >= 3:
        count = one.shape[0] * one.shape[1]
        yield one.reshape(count, -1), other.reshape(count, -1)


def _mask(given: Evidence) -> str | None:
    if given.values is None or given.word not in ("attention", "softmax", "matmul", "add", "where"):
        return None
    one, other = given.values
    # Scores of attention have an axis of heads, which other sums have not.
    if one.ndim < (4 if given.word in ("add", "where") else 3):
        return None
    rows = (abs(one - other) <= _CLOSE * abs(one).max()).all(-1)
    if rows.all() or not rows.any():
        return None
    by_place = rows.reshape(-1, rows.shape[-1])
    if (by_place.all(1) | ~by_place.any(1)).all():  # It does not depend on the place.
        if rows.ndim > 2 and not (rows == rows[:, :1]).all():
            return "heads: some heads agree, and others do not"
    elif not by_place[:, 1:].any():
        return None  # The first place may attend to itself only, whatever is wrong.
    return f"mask: {int(rows.sum())} of {rows.size} rows agree, and the others do not"


def _padding(given: Evidence) -> str | None:
    if given.word is None or not ("conv" in given.word or "pool" in given.word):
        return None
    if given.values is None:
        return "padding: the sizes of the results differ"
    one, other = given.values
    wrong = abs(one - other) > _CLOSE * abs(one).max()
    if one.ndim >= 4 and min(one.shape[2:]) > 2:
        inner = (slice(None), slice(None), *[slice(1, -1)] * (one.ndim - 2))
        if not wrong[inner].any():
            return "padding: only the border differs"
    kernels = [pair for pair in given.weights if pair[0].ndim > 2]
    if "pool" in given.word or any(_is_same_kernel(*pair, given) for pair in kernels):
        return "padding: the kernels agree, so padding, stride or dilation differ"
    return None


def _rotated(given: Evidence) -> str | None:
    if given.has_rotated():
        return "rotary: B has a vector of the same length that is rotated otherwise"
    return None


_CHECKS = (_dtype, _activation, _transposed, _scale, _bias, _epsilon, _rotated, _mask, _padding)


def _near(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    largest = float(abs(other).max()) if other.size else 0.0
    return bool((abs(one - other) <= _CLOSE * largest).all())


def _is_biased(values: Any, product: Any) -> bool:
    """Return True if a result is a product, with or without a bias."""
    rest = (values - product).reshape(-1, values.shape[-1])
    return bool((abs(rest - rest[0]) <= _CLOSE * abs(values).max()).all())


def _is_constant(values: Any, axis: int, scale: Any) -> bool:
    first = values.take([0], axis)
    return bool((abs(values - first) <= 1e-5 * max(abs(scale).max(), abs(values).max())).all())


def _erf(x: Any) -> Any:
    import numpy

    return numpy.vectorize(math.erf, otypes=[float])(x)


def _tanh_gelu(x: Any) -> Any:
    import numpy

    return x / 2 * (1 + numpy.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _sigmoid(x: Any) -> Any:
    import numpy

    return 0.5 * (1 + numpy.tanh(x / 2))


#: Common type -> what it computes.
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": lambda x: x / 2 * (1 + _erf(x / math.sqrt(2))),
    "the tanh approximation of gelu": _tanh_gelu,
    "x * sigmoid(1.702 x)": lambda x: x * _sigmoid(1.702 * x),
    "silu": lambda x: x * _sigmoid(x),
    "relu": lambda x: x * (x > 0),
    "sigmoid": _sigmoid,
    "tanh": lambda x: 2 * _sigmoid(2 * x) - 1,
    "leaky_relu": lambda x: x * (0.01 + 0.99 * (x > 0)),
}
