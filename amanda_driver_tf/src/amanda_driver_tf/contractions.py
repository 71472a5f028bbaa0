"""The axes of TensorFlow's products: what `Facts.contraction` returns. Imports no TensorFlow."""

from __future__ import annotations

from amanda_core.driver_kit import OpContext, contraction_of_equation, contraction_of_matmul
from amanda_core.interface import Contraction

__all__ = ["contraction"]


def contraction(context: OpContext) -> Contraction | None:
    """Return the axes of a product's operands; None for other operators."""
    kind, inputs, attrs = context["type"], context.get_inputs(), context.attrs
    facts = context.facts
    if inputs is None or facts is None or kind not in ("matmul", "einsum"):
        return None
    if kind == "einsum":
        equation = attrs.get("equation")
        listed = bool(inputs) and isinstance(inputs[0], (list, tuple))
        operands = inputs[0] if listed else inputs
        shapes = [facts.shape(one) for one in operands]
        if equation is None or None in shapes:
            return None
        places = [(0, n) if listed else n for n in range(len(shapes))]
        return contraction_of_equation(equation, places, [len(shape or ()) for shape in shapes])
    roles = context.get("input_roles", ())
    first, second = (facts.shape(one) if facts.is_tensor(one) else None for one in inputs[:2])
    if roles[:2] != ("left", "right") or not first or not second:
        return None
    turned = [any(attrs.get(f"{way}_{end}") for way in ("transpose", "adj")) for end in ("a", "b")]
    turned = [turned[n] or bool(attrs.get(f"adj_{'xy'[n]}")) for n in (0, 1)]
    return contraction_of_matmul((0, 1), (first, second), (turned[0], turned[1]))
