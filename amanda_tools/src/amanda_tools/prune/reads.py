"""Which reads of weights are pruned, and why others are not.

Owns the operators that count as products, and what is known of one that copies weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda_core import OpContext
from amanda_core.interface.facts import DENSE, SYMBOLIC
from amanda_core.weights.reads import Weight
from amanda_tools.kit.mapping import MappingTool
from amanda_tools.kit.tensors.types import size_of
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.kit.weights.copies import COPYING, Copies
from amanda_tools.prune.masks import array_part, torch_keeps, torch_part

__all__ = [
    "COPIES",
    "EMBEDDINGS",
    "KEEPS",
    "PART",
    "PRODUCTS",
    "WEIGHTED",
    "is_saved",
    "reason_against",
    "rules",
    "value_at",
    "weight_of",
]

#: Common types of the operators that may multiply by a weight, in any role.
PRODUCTS = frozenset(
    {"linear", "matmul", "grouped_matmul", "bilinear", "einsum", "rnn", "lstm", "gru"}
    | {"conv1d", "conv2d", "conv3d"}
    | {f"conv_transpose{dimensions}d" for dimensions in (1, 2, 3)}
)
#: Common types of those that always have a weight. One whose weight is not known is listed.
WEIGHTED = PRODUCTS - {"grouped_matmul", "bilinear", "einsum", "rnn", "lstm", "gru"}
#: Common types of the operators that copy a weight before it is multiplied by. Zeros of what is
#: quantized need not be zeros afterwards. What is repeated, as a table of positions is over an
#: image, is mostly added.
COPIES = COPYING - {"dequantize", "repeat", "tile"}
EMBEDDINGS = frozenset({"embedding", "embedding_bag"})
#: Roles of inputs that an operator does not multiply by as by a weight.
_OTHER_ROLES = frozenset({"bias", "addend", "input", "query", "key", "value", "mask"})
#: Keys of a context. Their values are functions: one takes a part of a mask, ``(mask, weight) ->
#: part``; one tells if an edit may be kept, where any may. Where parameters are read as a whole,
#: there are no parts. The last value is the number of axes along which a copying op picks elements,
#: if the index does not tell.
PART, KEEPS, _PICKED = "prune.part", "prune.keeps", "prune.picked"
_RIGHT = frozenset({"right"})


def rules() -> MappingTool:
    """Return the tool that says how frameworks read parts of parameters."""
    return MappingTool(
        [
            ["tensorflow", _picked_by_attributes],
            ["pytorch", _parts_by(torch_part, torch_keeps)],
            ["jax", _parts_by(array_part)],
        ]
    )


def reason_against(
    context: OpContext,
    place: int | tuple[int, int],
    weight: Weight,
    copies: Copies,
    embeddings: bool,
) -> str:
    """Return why a weight is not pruned where it is read, or an empty string if it may be.

    Args:
        context: The operator that reads it.
        place: The position of the input, and of the item in one that is a list.
        weight: The weight.
        copies: Where copies of weights are read.
        embeddings: Whether rows that are picked from tables may be pruned.
    """
    op_type, position = context["type"], place if isinstance(place, int) else place[0]
    how = f"read by {context.op_type}"
    rank = len(weight.shape) - sum(isinstance(index, int) for index in weight.region)
    memory, seen = weight.memory, weight.seen
    if memory is not None and seen is not None and memory.itemsize != seen.itemsize:
        return f"{how} as another type"
    if position in context.weights.written:
        return f"written by {context.op_type}"
    if not weight.exact and PART in context and KEEPS not in context:
        return f"{how} as a part that has no indices"
    if op_type in EMBEDDINGS:
        if not embeddings:
            return "read as an embedding"
        return "" if PART in context else f"{how}, which picks rows of the variable itself"
    if op_type in COPIES:
        if not isinstance(place, int) and not _is_of_weights(context, position, copies):
            return f"{how}, with values that are not weights"
        rank -= _picked_axes(context) if weight.axes else 0
        if rank <= 1:
            return f"{how}, which does not pick whole matrices"
        return ""
    if op_type is not None and op_type not in PRODUCTS:
        return f"{how}, which is not a product"
    # An unknown op may take a wrapper apart, whose parts then meet the mask elsewhere.
    value = value_at(context, place)
    layout = facts_of(context).layout(value)
    if layout not in (DENSE, SYMBOLIC) and (op_type is None or not _can_be_multiplied(value)):
        return f"{how}, {layout}"
    if rank < 2:
        return "a vector"
    if weight.role in _OTHER_ROLES:
        return f"{how} as {weight.role}"
    if weight.role == "left" and _RIGHT & {w.role for w in context.weights.values()}:
        return f"{how} as left"
    return ""


def _can_be_multiplied(tensor: Any) -> bool:
    """Return True if a product with a tensor is defined, as it is not for some quantized ones."""
    try:
        tensor * 1
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def is_saved(context: OpContext, place: int | tuple[int, int], weight: Weight) -> bool:
    """Return True if a program copies a weight to keep it, as from `state_dict`, for no product.

    Known on PyTorch, where such copies are made of a detached alias and outside of modules.
    """
    if context["type"] not in COPIES or PART not in context or context.weights.root:
        return False
    facts, value = facts_of(context), value_at(context, place)
    if not facts.is_parameter(weight.parameter) or value is weight.parameter:
        return False
    return facts.base(value) is value and not facts.wants_gradient(value)


def _is_of_weights(context: OpContext, position: int, copies: Copies) -> bool:
    """Return True if all tensors of a list are weights, or copies of some."""
    items = range(len(list(context.get_inputs() or ())[position]))
    known = copies.reads(context)
    return all((position, n) in context.weights or (position, n) in known for n in items)


def value_at(context: OpContext, place: int | tuple[int, int]) -> Any:
    """Return the value of an input, or of an item of one that is a list."""
    inputs: Any = context.get_inputs()
    return inputs[place] if isinstance(place, int) else inputs[place[0]][place[1]]


def _picked_axes(context: OpContext) -> int:
    """Return along how many axes of its first input a copying op picks elements."""
    if _PICKED in context:
        return int(context[_PICKED])
    facts, inputs = facts_of(context), list(context.get_inputs() or [])
    index = inputs[1] if len(inputs) > 1 else None
    if context["type"] not in ("slice", "gather"):
        return 0
    if not isinstance(index, tuple):
        index = (index,)
    tensors = [size_of(facts, i) for i in index if facts.is_tensor(i)]
    others = sum(isinstance(i, int) and not isinstance(i, bool) for i in index)
    # Without an index tensor, as in `index_select`, there is one axis.
    return max(1, len(tensors) + (others if tensors and len(index) > 1 else 0))


def _parts_by(
    part: Callable[[Any, Weight], Any], keeps: Callable[[], bool] | None = None
) -> Callable[[OpContext], None]:
    def rule(context: OpContext) -> None:
        context[PART] = part
        if keeps is not None:
            context[KEEPS] = keeps

    return rule


def _picked_by_attributes(context: OpContext) -> None:
    attributes = context.attrs
    # A slice keeps the axes of its first input but for these bits; it has no index that picks.
    if context["type"] == "slice" and "shrink_axis_mask" in attributes:
        context[_PICKED] = attributes["shrink_axis_mask"].bit_count()
    elif context.op_type == "Unpack":
        context[_PICKED] = 1
    elif context.op_type == "Split":
        # Into single rows, as a matrix of biases is.
        value = list(context.get_inputs() or ())[1]
        axis, shape = context.value(0), facts_of(context).shape(value)
        if axis is not None and shape is not None:
            context[_PICKED] = int(shape[int(axis)] == attributes["num_split"])


def weight_of(context: OpContext) -> int | None:
    """Return the position of the input whose role is that of a weight, or None."""
    roles: tuple[str, ...] = context.get("input_roles", ())
    return next((roles.index(role) for role in ("weight", "right") if role in roles), None)
