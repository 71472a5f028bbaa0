"""How the axes of a weight are arranged for a rule, whatever the framework's layout is.

Owns the order of axes, and the numbers of a tensor as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from amanda_core import OpContext
from amanda_core.interface.facts import Facts
from amanda_core.weights.reads import Weight
from amanda_tools.kit.tensors.values import facts_of, host, numbers

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
        outputs: How many axes are the outputs', and count as one.
        inputs: How many axes are the inputs', and count as one.
    """

    axes: list[int]
    batch: int
    known: bool
    kernel: bool
    outputs: int = 1
    inputs: int = 1

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a parameter that is arranged for a rule."""
        sizes = [shape[axis] for axis in self.axes]
        if not self.known:
            return tuple(sizes)
        first, second = self.batch + self.outputs, self.batch + self.outputs + self.inputs
        merged = math.prod(sizes[self.batch : first]), math.prod(sizes[first:second])
        return (*sizes[: self.batch], *merged, *sizes[second:])

    def arrange(self, array: Any) -> Any:
        """Return the elements of a parameter as a rule has them, an array for NumPy."""
        return array.transpose(self.axes).reshape(self.shape(array.shape))

    def restore(self, arranged: Any, shape: Sequence[int]) -> Any:
        """Return an arranged array as the parameter has its elements."""
        found = arranged.reshape([shape[axis] for axis in self.axes])
        return found.transpose(inverse_of(self.axes))


def order_of(context: OpContext, weight: Weight) -> Order:
    """Return how the axes of the parameter that a weight is part of are arranged for a rule."""
    word, letters = context["type"] or "", weight.letters
    natural = list(range(len(letters)))
    if word in _RECURRENT and len(letters) > 1:
        letters = letters[:-2] + "OI"
    kernel = word.startswith("conv")
    known = "O" in letters and "I" in letters and "M" not in letters
    axes = [axis for one in AXES for axis in natural if letters[axis] == one]
    if not known:
        whole = kernel or (word == "reshape" and _becomes_matrix(context))
        axes = axes if len(axes) == len(natural) else natural
        return Order(axes, 0 if whole else max(len(natural) - 2, 0), False, kernel)
    rest = [axis for axis in natural if axis not in axes]
    counts = letters.count("O"), letters.count("I")
    batch = sum(isinstance(index, int) for index in weight.region) if kernel else len(rest)
    return Order([*rest, *axes], batch, True, kernel, *counts)


def _becomes_matrix(context: OpContext) -> bool:
    """Return True if a copying reshape makes one matrix, as `tf.tensordot` does of an operand."""
    shape = context.value(1) if len(list(context.get_inputs() or ())) > 1 else None
    return shape is not None and len(shape) == 2


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
