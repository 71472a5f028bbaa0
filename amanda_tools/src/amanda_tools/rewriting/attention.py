"""Rule for attention as TensorFlow and Keras write it out, computed by a function of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda_tools.rewriting.patterns import Input, Operator
from amanda_tools.rewriting.rules import Matched, Rule

__all__ = ["attention"]

_SCORES, _VALUES = "abcd,aecd->acbe", "abcd,adbe->acbe"


def attention(function: Callable[..., Any], name: str = "attention") -> Rule:
    """Return a rule that computes the attention of Keras' layers on TensorFlow with `function`.

    It matches what ``keras.layers.MultiHeadAttention`` and ``keras.ops.dot_product_attention``
    execute: an einsum, the scale, a mask, a softmax, and another einsum. (A layer with dropout
    executes something else, whatever its mode.)

    Args:
        function: Called with ``query``, ``key`` and ``value`` of shape (batch, length, heads,
            size); ``scale``, a number or 1; and ``mask``, booleans that broadcast to (batch, heads,
            query length, key length), or None. Returns (batch, query length, heads, size).
        name: Name of the rule.
    """

    def replacement(match: Matched) -> Any:
        scaled = match.ops.get("scaled")
        scale = match.inputs.get("scale", 1.0)
        result = function(
            match.inputs["query"],
            match.inputs["key"],
            match.inputs["value"],
            scale=1.0 / scale if scaled is not None and scaled.type == "div" else scale,
            mask=match.inputs.get("mask"),
        )
        return [result]

    return Rule(name, _pattern(), replacement, _guard, framework="tensorflow")


def _pattern() -> Operator:
    scores = Operator(("Einsum",), {(0, 0): Input("query"), (0, 1): Input("key")}, "scores")
    scaled = Operator(("Mul", "RealDiv"), {0: scores, 1: Input("scale")}, "scaled", optional=True)
    masked = Operator(
        ("SelectV2",), {1: scaled, 0: Input("mask"), 2: Input("fill")}, "masked", optional=True
    )
    softmax = Operator(("Softmax",), {0: masked}, "softmax")
    return Operator(("Einsum",), {(0, 0): softmax, (0, 1): Input("value")}, "attention")


def _guard(match: Matched) -> str | None:
    if (_equation(match, "scores"), _equation(match, "attention")) != (_SCORES, _VALUES):
        return "its axes are in another order"
    fill = match.inputs.get("fill")
    if fill is not None and not _is_far(fill):
        return "its mask is of another kind"
    return None


def _equation(match: Matched, name: str) -> str:
    """Return the equation of an einsum with its letters renamed in alphabetical order."""
    equation = match.ops[name].get("equation")
    text = equation.decode() if isinstance(equation, bytes) else str(equation)
    letters: dict[str, str] = {}
    for letter in text:
        if letter.isalpha():
            letters.setdefault(letter, chr(ord("a") + len(letters)))
    return "".join(letters.get(letter, letter) for letter in text)


def _is_far(fill: Any) -> bool:
    """Return True if a value is so negative that its exponential is zero."""
    import numpy as np

    try:
        return bool(np.all(np.asarray(fill) < -1e4))
    except (TypeError, NotImplementedError):  # A symbolic tensor, whose value is unknown.
        return False
