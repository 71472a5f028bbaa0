"""Distance between two tensors, which may differ in dtype and in the order of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amanda_tools.diff.align import is_reshaped
from amanda_tools.kit.tensors.statistics import Statistics
from amanda_tools.kit.tensors.values import HostTensor, numbers

__all__ = [
    "Difference",
    "Tolerance",
    "compare_statistics",
    "compare_tensors",
    "epsilon",
    "is_huge",
    "orders",
    "spacing",
]

#: Floating-point dtype -> number of mantissa bits, exponent of the smallest normal number, and the
#: relative and absolute tolerance that PyTorch's own tests use for it.
_DTYPES = {
    "float64": (52, -1022, 1e-7, 1e-7),
    "float32": (23, -126, 1.3e-6, 1e-5),
    "float16": (10, -14, 1e-3, 1e-5),
    "bfloat16": (7, -126, 1.6e-2, 1e-5),
    "float8_e4m3fn": (3, -6, 0.125, 1e-2),
    "float8_e4m3fnuz": (3, -7, 0.125, 1e-2),
    "float8_e5m2": (2, -14, 0.25, 1e-2),
    "float8_e5m2fnuz": (2, -15, 0.25, 1e-2),
}
#: Largest number of the dtypes of which masks are made.
_LARGEST = {"float64": 1.7e308, "float32": 3.4e38, "bfloat16": 3.4e38, "float16": 65504.0}
_PARTS = {"complex64": "float32", "complex128": "float64"}


def epsilon(dtype: str) -> float | None:
    """Return the distance of 1 and the next larger number; None for a dtype that is not rounded.

    >>> epsilon("float16")
    0.0009765625
    """
    facts = _DTYPES.get(_PARTS.get(dtype, dtype))
    return None if facts is None else 2.0 ** -facts[0]


def spacing(dtype: str) -> float:
    """Return the distance of the numbers nearest to 0; 0 for a dtype that is not rounded.

    >>> spacing("float16")
    5.960464477539063e-08
    """
    facts = _DTYPES.get(_PARTS.get(dtype, dtype))
    return 0.0 if facts is None else 2.0 ** (facts[1] - facts[0])


@dataclass(frozen=True)
class Tolerance:
    """Tolerance for two numbers: ``|a - b| <= absolute + relative * |b|``.

    Attributes:
        relative: Relative tolerance; None for the default of the coarser of the two dtypes.
        absolute: Absolute tolerance; None for the same default.
    """

    relative: float | None = None
    absolute: float | None = None

    def of(self, *dtypes: str) -> tuple[float, float]:
        """Return relative and absolute tolerance for tensors of these dtypes; 0 for integers."""
        known = [_DTYPES[d] for d in (_PARTS.get(dtype, dtype) for dtype in dtypes) if d in _DTYPES]
        if not known:
            return 0.0, 0.0
        _, _, relative, absolute = max(known, key=lambda facts: facts[2])
        return (
            relative if self.relative is None else self.relative,
            absolute if self.absolute is None else self.absolute,
        )


@dataclass
class Difference:
    """The difference between two tensors.

    Attributes:
        within: Whether all elements are within the tolerance.
        equal: Whether the tensors are equal bit for bit.
        max_abs: Largest absolute difference between elements that are finite in both.
        max_rel: Largest difference relative to the second tensor.
        cosine: Cosine of the angle between the tensors; None if one is zero.
        ulp: Largest difference in units in the last place of the coarser dtype; None for integers,
            and if only statistics were compared.
        beyond: Number of elements beyond the tolerance.
        count: Number of elements.
        first: Index of the first element beyond the tolerance, in the first tensor's order of axes.
        values: The two elements at that index, as text. For statistics, the names and values that
            differ.
        order: Permutation that brought the second tensor's axes into the first's order, such as
            ``(0, 3, 1, 2)``; None if they were not permuted.
        apart: 2-norm of the difference, without elements that are infinite or near the largest
            number of their dtype in both; None if only one is not finite, or if only statistics
            were compared.
        norm: The larger one of the tensors' 2-norms, likewise.
    """

    within: bool
    equal: bool
    max_abs: float | None = None
    max_rel: float | None = None
    cosine: float | None = None
    ulp: float | None = None
    beyond: int = 0
    count: int = 0
    first: list[int] | None = None
    values: list[str] | None = None
    order: list[int] | None = None
    apart: float | None = None
    norm: float | None = None

    def __str__(self) -> str:
        """Describe the difference."""
        if self.equal:
            return "the same bit for bit"
        parts = [
            f"{name} {value:.4g}"
            for name, value in (("max abs", self.max_abs), ("max rel", self.max_rel))
            if value is not None
        ]
        parts += [f"cosine {self.cosine:.6f}"] if self.cosine is not None else []
        parts += [f"{self.ulp:.4g} ULP"] if self.ulp is not None else []
        if self.first is not None and self.values is not None:
            parts.append(
                f"{self.beyond} of {self.count} beyond the tolerance, the first at {self.first}: "
                + " and ".join(self.values)
            )
        elif self.values:
            parts.append(", ".join(self.values))
        return ", ".join(parts)


def orders(first: Sequence[int], second: Sequence[int], layouts: Sequence[str | None]) -> Any:
    """Yield the permutations by which a second tensor's axes may correspond to a first's.

    Args:
        first: Shape of the first tensor.
        second: Shape of the second tensor.
        layouts: Both layouts, such as ``NCHW`` and ``NHWC``; None if unknown. Channels may then be
            first in one tensor and last in the other. Square matrices are not transposed.
    """
    rank = len(first)
    if len(second) != rank:
        return
    found = [tuple(range(rank))]
    one, other = layouts
    if one and other and len(one) == len(other) == rank and sorted(one) == sorted(other):
        found.insert(0, tuple(other.index(axis) for axis in one))
    elif rank >= 3:
        # Channels last, for data and for filters (HWIO).
        found.append((0, rank - 1, *range(1, rank - 1)))
        found.append((0, *range(2, rank), 1))
        found.append((rank - 1, rank - 2, *range(rank - 2)))
        found.append((*range(2, rank), 1, 0))
    elif rank == 2 and list(first) != list(second):
        found.append((1, 0))
    for order in dict.fromkeys(found):
        if [second[axis] for axis in order] == list(first):
            yield order


def compare_tensors(
    first: HostTensor,
    second: HostTensor,
    tolerance: Tolerance,
    layouts: Sequence[str | None] = (None, None),
    across: bool = False,
) -> Difference | None:
    """Return how far two tensors are apart, or None if their shapes do not fit.

    Args:
        first: The first tensor.
        second: The second tensor.
        tolerance: The tolerance.
        layouts: Their layouts, as far as known.
        across: Whether the axes may be in another order.
    """
    if across and is_reshaped(first.array.shape, second.array.shape):
        second = HostTensor(second.array.reshape(first.array.shape), second.dtype)
    shapes = first.array.shape, second.array.shape
    found = orders(*shapes, layouts) if across else [None] * (shapes[0] == shapes[1])
    best: Difference | None = None
    # If several orders fit, use the one in which the tensors are closest.
    for order in found:
        moved = second.array if order is None else second.array.transpose(order)
        difference = _compare(first, HostTensor(moved, second.dtype), tolerance)
        if order is not None and order != tuple(range(len(order))):
            difference.order = list(order)
        if best is None or _distance(difference) < _distance(best):
            best = difference
        if best.within:
            break
    return best


def compare_statistics(
    first: Statistics, second: Statistics, dtypes: Sequence[str], tolerance: Tolerance
) -> Difference:
    """Return how far the statistics of two tensors are apart, which does not depend on the order of
    axes.
    """
    relative, absolute = tolerance.of(*dtypes)
    limits = [abs(v) for f in (first, second) for v in (f.min, f.max) if v is not None]
    # Elements may cancel in a mean, so the tolerance is relative to the largest element.
    allowed = absolute + relative * max(limits, default=0.0)
    beyond, largest = [], 0.0
    for name in ("count", "nan", "inf"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            beyond.append(f"{name} {one} and {other}")
    for name in ("min", "max", "mean", "std", "norm"):
        one, other = getattr(first, name), getattr(second, name)
        if one is None or other is None:
            continue
        apart = abs(one - other)
        largest = max(largest, apart)
        # The norm grows with the number of elements, and its error with it.
        if apart > allowed * (max(first.count, 1) ** 0.5 if name == "norm" else 1):
            beyond.append(f"{name} {one:.6g} and {other:.6g}")
    return Difference(
        not beyond, first == second, largest, count=first.count, values=beyond or None
    )


def _compare(first: HostTensor, second: HostTensor, tolerance: Tolerance) -> Difference:
    import numpy

    bits, others = (
        numpy.ascontiguousarray(t.array).reshape(-1).view("u1") for t in (first, second)
    )
    if first.dtype == second.dtype and numpy.array_equal(bits, others):
        return Difference(True, True, 0.0, 0.0, ulp=0.0, count=first.array.size)
    one, other = (numbers(tensor.array, tensor.dtype) for tensor in (first, second))
    kinds = {one.dtype.kind, other.dtype.kind}
    wide = "complex128" if "c" in kinds else "float64"
    x, y = one.astype(wide), other.astype(wide)
    finite = numpy.isfinite(x) & numpy.isfinite(y)
    relative, absolute = tolerance.of(first.dtype, second.dtype)
    with numpy.errstate(all="ignore"):
        apart = numpy.abs(x - y)
        size = numpy.abs(y)
        near = (one == other) | (numpy.isnan(x) & numpy.isnan(y))
        if relative or absolute:  # Large integers may be equal in float64 and still differ.
            near |= finite & (apart <= absolute + relative * size)
        known = apart[finite]
        ratios = known[known > 0] / size[finite][known > 0]
        ratios = ratios[numpy.isfinite(ratios)]
        # A mask has infinities, or numbers near the largest of its dtype, which do not compare.
        masked = is_huge(x, first.dtype) & is_huge(y, second.dtype) & (x * y > 0)
        ordinary = finite & ~masked
        parts = [values[ordinary] for values in (apart, x, y) if near[~finite].all()]
        norms = [float(numpy.linalg.norm(part)) for part in parts]
    difference = Difference(
        bool(near.all()),
        False,
        float(known.max()) if known.size else None,
        float(ratios.max()) if ratios.size else (0.0 if known.size and not known.any() else None),
        _cosine(x[finite], y[finite]),
        None if kinds <= set("biu") else _ulp(x, y, apart, finite, first.dtype, second.dtype),
        int((~near).sum()),
        int(x.size),
    )
    if norms:
        difference.apart, difference.norm = norms[0], max(norms[1:])
    if not difference.within:
        index = numpy.unravel_index(int(numpy.argmin(near)), x.shape)
        difference.first = [int(number) for number in index]
        difference.values = [
            f"{value[index]:.9g}" if value.dtype.kind in "fc" else str(value[index])
            for value in (one, other)
        ]
    return difference


def is_huge(values: Any, dtype: str) -> Any:
    """Return where elements are so large that a mask may have set them."""
    import numpy

    largest = _LARGEST.get(_PARTS.get(dtype, dtype), numpy.inf)
    return numpy.abs(values) > largest / 4


def _distance(difference: Difference) -> float:
    cosine = -1.0 if difference.cosine is None else difference.cosine
    return difference.beyond + (1 - cosine)


def _cosine(x: Any, y: Any) -> float | None:
    import numpy

    if not x.size:
        return None
    largest = float(numpy.abs(x).max()), float(numpy.abs(y).max())
    if not all(largest):
        return None
    x, y = x.ravel() / largest[0], y.ravel() / largest[1]  # So that squares do not overflow.
    product = abs(numpy.vdot(x, y)) if x.dtype.kind == "c" else numpy.dot(x, y)
    return float(product / (numpy.linalg.norm(x) * numpy.linalg.norm(y)))


def _ulp(x: Any, y: Any, apart: Any, finite: Any, *dtypes: str) -> float | None:
    import numpy

    known = [_DTYPES[d] for d in (_PARTS.get(dtype, dtype) for dtype in dtypes) if d in _DTYPES]
    if not known or not finite.any():
        return None
    mantissa, smallest, *_ = min(known)
    _, exponents = numpy.frexp(numpy.maximum(numpy.abs(x), numpy.abs(y))[finite])
    places = numpy.ldexp(1.0, numpy.maximum(exponents - 1, smallest) - mantissa)
    with numpy.errstate(over="ignore"):
        return float((apart[finite] / places).max())
