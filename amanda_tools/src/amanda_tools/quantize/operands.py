"""The operands of an operator that are quantized, and along which axes a weight has scales.

Owns the choice by common operator type and role.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from amanda_core import OpContext
from amanda_core.interface.facts import Facts
from amanda_core.weights.geometry import contiguous
from amanda_core.weights.reads import Weight, letters_of
from amanda_tools.kit.tensors.types import is_real

__all__ = [
    "PRODUCTS",
    "Operand",
    "is_quantizable",
    "operands_of",
    "scale_part",
    "shared",
    "shared_axes",
    "value_at",
    "why_not",
    "why_unreached",
    "with_item",
]

_LAYERS = frozenset(
    {"linear", "conv1d", "conv2d", "conv3d"}
    | {f"conv_transpose{dimensions}d" for dimensions in (1, 2, 3)}
)
_EMBEDDINGS = frozenset({"embedding", "embedding_bag"})
_RECURRENT = frozenset({"rnn", "lstm", "gru"})
#: Common types of the operators whose operands are quantized.
PRODUCTS = (
    _LAYERS
    | _EMBEDDINGS
    | _RECURRENT
    | {"matmul", "grouped_matmul", "bilinear", "einsum", "attention"}
)
#: Roles of the operands of a product. A bias is quantized apart.
_FACTORS = frozenset({"input", "weight", "left", "right", "query", "key", "value"})
_BIASES = frozenset({"bias", "addend"})
#: Layouts of tensors that have only a part of their elements here, or none.
_ELSEWHERE = frozenset({"sparse", "nested", "quantized", "without data", "without a storage"})


class Operand(NamedTuple):
    """An operand that is quantized.

    Attributes:
        position: Its input position.
        item: Its index if the input is a list; None if it is not.
        role: Its role, or the number of its position.
        weight: The weight that it is; None for an activation.
        is_bias: Whether it is added to a product.
        copied: Whether it is a copy of a weight, such as rows that were gathered.
    """

    position: int
    item: int | None
    role: str
    weight: Weight | None
    is_bias: bool = False
    copied: bool = False

    @property
    def place(self) -> int | tuple[int, int]:
        """Its key in what is known of an operator's inputs."""
        return self.position if self.item is None else (self.position, self.item)


def is_quantizable(facts: Facts, value: Any) -> bool:
    """Return True for a tensor of real floating-point numbers that has them in memory, or a list
    that contains one.

    Processes may hold parts of it.
    """
    if isinstance(value, (list, tuple)):
        return any(is_quantizable(facts, item) for item in value)
    return is_real(facts, value) and not why_not(facts, value)


def why_not(facts: Facts, value: Any) -> str:
    """Return in a few words why a tensor cannot be quantized; an empty text if it can."""
    layout = facts.layout(value)
    if layout in _ELSEWHERE:
        return f"{layout}, not dense"
    placement = facts.placement(value)
    # The sum of quantized terms is not a quantized sum.
    return "not reduced over processes yet" if placement is not None and placement.partial else ""


def operands_of(context: OpContext, facts: Facts) -> list[Operand]:
    """Return the operands of an op that are quantized; none if it is not such an operator."""
    kind, inputs = context["type"], context.get_inputs()
    if inputs is None or (kind not in PRODUCTS and kind != "add"):
        return []
    if kind in _RECURRENT:
        return _recurrent_operands(context, facts)
    roles: tuple[str, ...] = context.get("input_roles", ())
    reads = context.weights
    found = []
    for position, value in enumerate(inputs):
        role = roles[position] if position < len(roles) else None
        if role in _BIASES:
            weight = reads.get(position)
            if is_quantizable(facts, value):
                found.append(Operand(position, None, role or "", weight, True))
            continue
        if roles and role not in _FACTORS and kind != "add":
            continue
        items: Sequence[tuple[int | None, Any]] = [(None, value)]
        if isinstance(value, (list, tuple)):
            # The terms of a sum of a list are not residuals.
            items = [] if kind == "add" else list(enumerate(value))
        elif not roles and kind not in ("add", "einsum") and position > 1:
            continue
        for item, one in items:
            weight = reads.get(position if item is None else (position, item))
            if is_quantizable(facts, one):
                name = role or str(position if item is None else item)
                found.append(Operand(position, item, name, weight))
    if kind == "add" and not _is_residual(found, inputs, facts):
        return []
    return found


def _recurrent_operands(context: OpContext, facts: Facts) -> list[Operand]:
    """Return the input and the matrices of a recurrent operator.

    One that computes a single step multiplies the state by a matrix as well. The states inside an
    operator that computes all steps cannot be reached.
    """
    inputs, matrices = list(context.get_inputs() or ()), []
    for place, weight in context.weights.items():
        position, item = place if isinstance(place, tuple) else (place, None)
        value = inputs[position] if item is None else inputs[position][item]
        if len(weight.axes) == 2 and is_quantizable(facts, value):
            matrices.append(Operand(position, item, "weight", weight))
    found = []
    if matrices and is_quantizable(facts, inputs[0]):
        found.append(Operand(0, None, "input", None))
        single = all(one.item is None for one in matrices)
        states = inputs[1] if isinstance(inputs[1], (list, tuple)) else [inputs[1]]
        if single and is_quantizable(facts, states[0]):
            item = 0 if isinstance(inputs[1], (list, tuple)) else None
            found.append(Operand(1, item, "state", None))
    return [*found, *matrices]


def why_unreached(context: OpContext, facts: Facts, operands: Sequence[Operand], at: int) -> str:
    """Return why a weight is not an operand that is quantized.

    Args:
        context: The op's context.
        facts: The driver's facts.
        operands: Those of the op that are quantized.
        at: The weight's input position.
    """
    if operands:
        return "added, not multiplied"
    inputs = list(context.get_inputs() or ())
    how = f"read by {context.op_type}"
    if context["type"] in PRODUCTS and facts.is_tensor(inputs[at]):
        how += f" as {facts.dtype(inputs[at])}"
        layout = facts.layout(inputs[at])
        how += f", {layout}" if layout in _ELSEWHERE else ""
    return how


def value_at(context: OpContext, operand: Operand) -> Any:
    """Return the present value of an operand."""
    inputs: Any = context.get_inputs()
    value = inputs[operand.position]
    if (
        operand.weight is not None
        and (found := context.value(operand.position, operand.item)) is not None
    ):
        return found
    return value if operand.item is None else value[operand.item]


def with_item(whole: Any, item: int | None, new: Any) -> Any:
    """Return an input in which one item of a list is replaced, or all of it if `item` is None."""
    if item is None:
        return new
    return type(whole)(new if index == item else one for index, one in enumerate(whole))


def _is_residual(operands: Sequence[Operand], inputs: Sequence[Any], facts: Facts) -> bool:
    """Return True if an addition is that of two activations of one shape."""
    if len(operands) != 2 or any(one.weight is not None for one in operands):
        return False
    shapes = [facts.shape(inputs[one.position]) for one in operands]
    return shapes[0] == shapes[1] and shapes[0] is not None and len(shapes[0]) > 1


def shared_axes(context: OpContext, operand: Operand, rank: int, per: str = "channel") -> list[int]:
    """Return the axes of an operand whose elements share a scale.

    In a channel these are the axes along which a product sums, or a table has the columns.

    Args:
        context: The op's context.
        operand: The operand.
        rank: The number of its axes.
        per: ``channel`` or ``tensor``.
    """
    letters = letters_of(context, operand.place, context.weights)
    if letters is not None and len(letters) == rank:
        return shared(letters, per)
    kind = context["type"]
    if kind == "einsum" or (per == "tensor" and rank < 3):
        return list(range(rank))
    if per == "tensor":
        return [rank - 2, rank - 1]
    if kind in _EMBEDDINGS | _RECURRENT or operand.role in ("left", "input"):
        return [rank - 1]
    return [max(rank - 2, 0)]


def shared(letters: str, per: str) -> list[int]:
    """Return the axes whose elements share a scale, by the letters of all axes.

    Groups, such as experts, never share one.

    >>> shared("GIO", "tensor"), shared("IOO", "channel"), shared("HWIM", "channel")
    ([1, 2], [0], [0, 1])
    """
    # A depthwise kernel has a channel for each input channel and multiple.
    kept = "IM" if {*"IM"} <= {*letters} else "O"
    apart = "G" if per == "tensor" else "G" + kept
    return [axis for axis, letter in enumerate(letters) if letter not in apart]


def scale_part(scale: Any, weight: Weight) -> Any:
    """Return the scales of the part that an op reads of a parameter, in the axes of that part.

    Args:
        scale: The scales of the parameter: an array of its rank, with size 1 along the axes whose
            elements share one.
        weight: The part.

    Returns:
        An array that broadcasts to the part; None if indices cannot express the part.
    """
    if scale.size == 1:
        return scale.reshape(())
    if not weight.exact:
        return None
    for axis, index in enumerate(weight.region):
        if scale.shape[axis] == 1:
            continue
        picked = slice(index, index + 1) if isinstance(index, int) else index
        scale = scale[(slice(None),) * axis + (picked,)]
    axes = [axis for axis in weight.axes if axis is not None]
    others = [axis for axis in range(scale.ndim) if axis not in axes]
    if any(scale.shape[axis] != 1 for axis in others):
        return _reshaped(scale, weight)
    shape = [1 if axis is None else scale.shape[axis] for axis in weight.axes]
    return scale.transpose(others + axes).reshape(shape)


def _reshaped(scale: Any, weight: Weight) -> Any:
    """Return the scales of a whole parameter in the shape of its view; None if it is another."""
    import numpy

    whole, seen = weight.memory, weight.seen
    if weight.region or whole is None or seen is None:
        return None
    dense = [
        one.strides == contiguous(0, 0, one.shape, math.prod(one.shape)).strides
        for one in (whole, seen)
    ]
    if not all(dense):
        return None
    return numpy.array(numpy.broadcast_to(scale, weight.shape)).reshape(seen.shape)
