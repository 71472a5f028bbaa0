"""Products with weights of two, three and four axes, and what tools make of the weights.

Owns the closed forms in NumPy. The letters of axes are written by hand: G an index with a product
of its own, O an output, I summed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from amanda_tools.prune import Prune, PruneNM
from amanda_tools.quantize import Quantize

__all__ = ["CASES", "TOOLS", "Case"]


class Case(NamedTuple):
    """A product of an input and a weight.

    Attributes:
        equation: What it computes, for `numpy.einsum`.
        x: Shape of the input.
        w: Shape of the weight.
        letters: What each axis of the weight is.
        swapped: Whether the weight is the first operand.
    """

    equation: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    letters: str
    swapped: bool = False

    @property
    def operands(self) -> tuple[Any, Any]:
        """The input and the weight, whose rows along each axis have other magnitudes."""
        random = np.random.RandomState(0)
        weight = random.randn(*self.w)
        for axis, size in enumerate(self.w):
            weight *= np.geomspace(1, 3, size).reshape(-1, *[1] * (len(self.w) - axis - 1))
        return random.randn(*self.x).astype("float32"), weight.astype("float32")

    def of(self, x: Any, weight: Any) -> Any:
        """Return the product as NumPy computes it."""
        return np.einsum(self.equation, *((weight, x) if self.swapped else (x, weight)))


#: Name -> case. The first are written as equations in each framework.
CASES: Mapping[str, Case] = {
    "heads": Case("bd,dnh->bnh", (5, 4), (4, 2, 3), "IOO"),
    "heads_first": Case("bd,ndh->bnh", (5, 4), (3, 4, 2), "OIO"),
    "back_from_heads": Case("btnh,nhd->btd", (2, 5, 2, 4), (2, 4, 3), "IIO"),
    "experts": Case("ebd,edf->ebf", (3, 5, 4), (3, 4, 2), "GIO"),
    "experts_inside": Case("ebd,def->ebf", (3, 5, 4), (4, 3, 2), "IGO"),
    "experts_and_heads": Case("ebd,ednh->ebnh", (3, 5, 4), (3, 4, 2, 3), "GIOO"),
    "weight_first": Case("hd,bd->bh", (5, 4), (6, 4), "OI", True),
    "all_for_all": Case("bd,edf->ebf", (5, 4), (3, 4, 2), "OIO"),
}


def _arranged(case: Case, weight: Any, letters: str) -> tuple[Any, list[int]]:
    """Return a weight with its axes in the order of letters, and that order."""
    order = [n for one in letters for n, letter in enumerate(case.letters) if letter == one]
    return weight.transpose(order), order


def _zeroed(case: Case, weight: Any, each: Callable[[Any], Any], letters: str = "GOI") -> Any:
    """Return a weight of which `each` edits the rows: one of each group."""
    moved, order = _arranged(case, weight, letters)
    rows = each(moved.reshape(*moved.shape[: case.letters.count("G")], -1).copy())
    return rows.reshape(moved.shape).transpose(np.argsort(order))


def _half(rows: Any) -> Any:
    smallest = np.argsort(abs(rows), axis=-1, kind="stable")[..., : rows.shape[-1] // 2]
    np.put_along_axis(rows, smallest, 0, axis=-1)
    return rows


def _two_of_four(rows: Any) -> Any:
    return _half(rows.reshape(-1, 4))


def _rounded(case: Case, weight: Any, kept: str) -> Any:
    axes = tuple(n for n, letter in enumerate(case.letters) if letter not in kept)
    scale = abs(weight).max(axes, keepdims=True) / 127
    return (weight / scale).round().clip(-127, 127) * scale


def _quantize(per: Any) -> Quantize:
    return Quantize("static", weights="int8", activations="none", per=per)


#: Name -> the tool, and what it makes of a weight.
TOOLS: Mapping[str, tuple[Callable[[], Any], Callable[[Case, Any], Any]]] = {
    "prune": (lambda: Prune(0.5), lambda case, w: _zeroed(case, w, _half)),
    "prune_nm": (lambda: PruneNM(2, 4), lambda case, w: _zeroed(case, w, _two_of_four)),
    "per_tensor": (lambda: _quantize("tensor"), lambda case, w: _rounded(case, w, "G")),
    "per_channel": (lambda: _quantize("channel"), lambda case, w: _rounded(case, w, "GO")),
}
