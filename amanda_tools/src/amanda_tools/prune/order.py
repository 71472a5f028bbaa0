"""How the axes of a weight are arranged for a rule, whatever the framework's layout is.

Owns the order of axes, and the numbers of a tensor as arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from amanda_core import OpContext
from amanda_core.facts import Facts
from amanda_core.weights.reads import Weight
from amanda_tools.tensors.values import facts_of, host, numbers

__all__ = ["AXES", "Order", "array_of", "axes_of", "inverse_of", "numbers_of", "order_of"]

#: The order of the axes in which equal magnitudes are pruned, the same for every layout.
AXES = "OIDHW"
_RECURRENT = frozenset({"rnn", "lstm", "gru"})


class Order(NamedTuple):
    """How the axes of a weight are arranged for a rule, whatever the framework's layout is.

    Attributes:
        axes: The parameter's axes: first those of separate matrices, such as experts, then output,
            input and spatial axes.
        batch: How many of the first axes count separate matrices.
        known: Whether it is known which axis is the output's and which the input's.
        kernel: Whether it is the kernel of a convolution.
    """

    axes: list[int]
    batch: int
    known: bool
    kernel: bool


def order_of(context: OpContext, weight: Weight) -> Order:
    """Return how the axes of the parameter that a weight is part of are arranged for a rule."""
    word, rank = context["type"] or "", len(weight.shape)
    kernel = word.startswith("conv")
    layout = weight.layout
    if layout is None and weight.role == "right":
        layout = context.get("weight_layout")
    if layout is None and len(weight.axes) > 1:
        ends = {"right": "IO", "left": "OI"}.get(weight.role or "", "")
        ends = "OI" if word in _RECURRENT else ends
        layout = "." * (len(weight.axes) - 2) + ends
    named = zip(layout or "", axes_of(weight), strict=False)
    letters = {letter: axis for letter, axis in named if axis is not None}
    axes = [letters[letter] for letter in AXES if letter in letters]
    known = "O" in letters and "I" in letters and "M" not in letters
    natural = list(range(rank))
    if not known and len(axes) != rank:
        axes = natural
    order = [*(axis for axis in natural if axis not in axes), *axes]
    return Order(order, 0 if kernel else max(rank - 2, 0), known, kernel)


def axes_of(weight: Weight) -> list[int | None]:
    """Return the parameter's axis of each axis of the input, also of those with one element."""
    axes, inner = list(weight.axes), [n for n, i in enumerate(weight.region) if isinstance(i, int)]
    free = [axis for axis in range(len(weight.shape)) if axis not in axes and axis not in inner]
    # Nothing in memory tells the axis of one element, but if all others are known, it is left over.
    if axes.count(None) == len(free) and weight.exact:
        axes = [free.pop(0) if axis is None else axis for axis in axes]
    return axes


def array_of(context: OpContext, tensor: Any) -> Any:
    """Return the numbers of a tensor as a NumPy array."""
    return numbers_of(facts_of(context), tensor)


def numbers_of(facts: Facts, tensor: Any) -> Any:
    """Return the numbers of a tensor as a NumPy array."""
    copy = host(facts, tensor)
    return numbers(copy.array, copy.dtype)


def inverse_of(axes: list[int]) -> list[int]:
    """Return the order of axes that undoes an order of axes."""
    return sorted(range(len(axes)), key=axes.__getitem__)
