"""The axes of PyTorch's products: what `Facts.contraction` returns. Does not import torch."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import (
    OpContext,
    contraction_of_axes,
    contraction_of_equation,
    contraction_of_matmul,
)
from amanda_core.interface import Contraction

__all__ = ["contraction"]


def contraction(context: OpContext) -> Contraction | None:
    """Return the axes of a product's operands; None for other operators."""
    kind, inputs = context["type"], context.get_inputs()
    if inputs is None or kind not in ("matmul", "einsum", "grouped_matmul", "bilinear"):
        return None
    name = context.op_type.rpartition("::")[2].removesuffix("_")
    try:
        if kind == "einsum":
            return _einsum(name, inputs)
        if kind == "bilinear":
            return _of(inputs, "...i,...j,oij->...o", (0, 1, 2)) if name == "bilinear" else None
        if kind == "grouped_matmul":
            return _grouped(inputs)
        return _product(name, inputs, context.get("input_roles", ()))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None  # Operands without a shape, such as nested tensors.


def _einsum(name: str, inputs: Sequence[Any]) -> Contraction | None:
    if name == "tensordot":
        ranks = [inputs[0].dim(), inputs[1].dim()]
        return contraction_of_axes((0, 1), ranks, (inputs[2], inputs[3]))
    tensors = inputs[1]
    places = [(1, item) for item in range(len(tensors))]
    return contraction_of_equation(inputs[0], places, [one.dim() for one in tensors])


def _of(inputs: Sequence[Any], equation: str, places: tuple[int, ...]) -> Contraction | None:
    return contraction_of_equation(equation, places, [inputs[place].dim() for place in places])


def _grouped(inputs: Sequence[Any]) -> Contraction | None:
    rows, weight = inputs[0].dim(), inputs[1].dim()
    if (rows, weight) == (2, 3):
        return Contraction((0, 1), ("nk", "gkm"), "nm", "g")
    if (rows, weight) == (3, 3):
        return contraction_of_matmul((0, 1), [inputs[0].shape, inputs[1].shape])
    return Contraction((0, 1), ("gnk", "km"), "nm", "g") if rows == 3 else None


def _product(name: str, inputs: Sequence[Any], roles: tuple[str, ...]) -> Contraction | None:
    if isinstance(inputs[0], (list, tuple)):  # `chain_matmul` and `multi_dot`
        chain = string.ascii_letters[: len(inputs[0]) + 1]
        terms = [chain[n : n + 2] for n in range(len(inputs[0]))]
        terms[0] = terms[0][-inputs[0][0].dim() :]
        terms[-1] = terms[-1][: inputs[0][-1].dim()]
        ends = "".join(one for one in chain[:: len(chain) - 1] if one in terms[0] + terms[-1])
        return Contraction(tuple((0, n) for n in range(len(terms))), tuple(terms), ends)
    known = "left" in roles and "right" in roles
    places = (roles.index("left"), roles.index("right")) if known else (0, 1)
    shapes = [tuple(inputs[place].shape) for place in places]
    if name == "inner":
        return contraction_of_axes(places, [*map(len, shapes)], ((-1,), (-1,)))
    return contraction_of_matmul(places, shapes, summed="0" if name == "addbmm" else "")
