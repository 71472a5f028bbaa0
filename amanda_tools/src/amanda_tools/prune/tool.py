"""`Prune`: static pruning of weights by magnitude, on every backend with common operator types.

Owns which weights are pruned and by which mask. Mapping rules say how a framework's tensor becomes
a mask. The routine only multiplies, which all tensors can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.activation import autodiff_enabled
from amanda_core.facts import DENSE, SYMBOLIC, NotReadableError
from amanda_core.weights.reads import Weight
from amanda_core.weights.state import WeightState
from amanda_tools.mapping import MappingTool
from amanda_tools.operators.clock import Clock
from amanda_tools.prune.masks import (
    multiply,
    multiply_items,
    numpy_mask,
    torch_keeps,
    torch_mask,
    torch_part,
)
from amanda_tools.prune.result import PrunedWeight, PruneResult
from amanda_tools.tensors.types import size_of
from amanda_tools.tensors.values import facts_of
from amanda_tools.weight_copies import COPYING, Copies
from amanda_tools.weight_coverage import WeightCoverage
from amanda_tools.weight_writes import Watch

__all__ = ["Prune"]

#: Common types of the operators that may multiply by a weight, in any role.
_PRODUCTS = frozenset(
    {"linear", "matmul", "grouped_matmul", "bilinear", "einsum", "rnn", "lstm", "gru"}
    | {"conv1d", "conv2d", "conv3d"}
    | {f"conv_transpose{dimensions}d" for dimensions in (1, 2, 3)}
)
#: Common types of those that always have a weight. One whose weight is not known is listed.
_WEIGHTED = _PRODUCTS - {"grouped_matmul", "bilinear", "einsum", "rnn", "lstm", "gru"}
#: Common types of the operators that copy a weight before it is multiplied by. Zeros of what is
#: quantized need not be zeros afterwards.
_COPIES = COPYING - {"dequantize"}
_EMBEDDINGS = frozenset({"embedding", "embedding_bag"})
#: Roles of inputs that an operator does not multiply by as by a weight.
_OTHER_ROLES = frozenset({"bias", "addend", "input", "query", "key", "value", "mask"})
#: The order of the axes in which equal magnitudes are pruned, the same for every layout.
_AXES = "OIDHW"
#: Keys of a context. Their values are functions: one makes a mask, ``(weight, axes, count) ->
#: mask``; one takes a part of it, ``(mask, weight) -> part``; one tells if an edit may be kept.
#: Where parameters are read as a whole, there are no parts. The last value is the number of axes
#: along which a copying op picks elements, if the index does not tell.
_MASK, _PART, _KEEPS, _PICKED = "prune.mask", "prune.part", "prune.keeps", "prune.picked"
_RIGHT = frozenset({"right"})


class Prune(Tool):
    """Sets the smallest weights of each convolution and linear layer to zero, by magnitude.

    The weights themselves do not change: each operator gets its weight times a mask. The mask of a
    parameter is made when a part of it is first read, and then kept. Gradients of the weights are
    masked in the same way. Of equal magnitudes the first ones are pruned, so that the number of
    pruned elements is exact.

    Args:
        sparsity: The fraction of each weight that is set to zero, from 0 to 1.
        gradients: Whether to mask the gradients of the weights as well.
        embeddings: Whether to prune embedding tables where rows are picked from them.

    Attributes:
        masks: The mask of each parameter.

    Raises:
        ValueError: `sparsity` is not between 0 and 1.

    >>> tool = Prune(sparsity=0.5)
    """

    def __init__(self, sparsity: float, gradients: bool = True, embeddings: bool = False) -> None:
        super().__init__()
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must be from 0 to 1, but is {sparsity}")
        self.sparsity = sparsity
        self.gradients = gradients
        self.embeddings = embeddings
        self.masks: WeightState[Any] = WeightState()
        self._copies = Copies()
        self._result = PruneResult(sparsity)
        self._coverage = WeightCoverage()
        #: Owner -> the parameter that is pruned.
        self._rows: dict[str, PrunedWeight] = {}
        self._clock = Clock()
        self.depends_on(
            self._copies,
            Watch(self.masks),
            MappingTool(
                [
                    ["*", _by_values],
                    ["tensorflow", _by(numpy_mask)],
                    ["tensorflow", _picked_by_mask],
                    ["pytorch", _by(torch_mask)],
                    ["pytorch", _parts_by(torch_part, torch_keeps)],
                ]
            ),
        )
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Prune the op's weights, if it has any."""
        reads = context.weights
        self._coverage.add_parameters(reads)
        if not reads.supported:
            self._prune_by_op(context)
            return
        if not reads.consumed or context.zone != "model":
            self._list_skipped(context, bool(reads))
            return
        chosen = {}
        for place, weight in reads.items():
            reason = self._reason_against(context, place, weight)
            if reason:
                self._coverage.add_unreached(weight, reason)
            else:
                chosen[place] = weight
        if chosen:
            self._prune(context, chosen)
        self._list_skipped(context, bool(chosen))

    def _list_skipped(self, context: OpContext, known: bool) -> None:
        # Copies of weights were pruned where they were made, or are listed as not reached.
        if context["type"] in _WEIGHTED and not known and not self._copies.reads(context):
            self._prune_by_op(context)

    def _reason_against(
        self, context: OpContext, place: int | tuple[int, int], weight: Weight
    ) -> str:
        """Return why a weight is not pruned where it is read, or an empty string if it is."""
        op_type, position = context["type"], place if isinstance(place, int) else place[0]
        how = f"read by {context.op_type}"
        rank = len(weight.shape) - sum(isinstance(index, int) for index in weight.region)
        memory, seen = weight.memory, weight.seen
        if memory is not None and seen is not None and memory.itemsize != seen.itemsize:
            return f"{how} as another type"
        if position in context.weights.written:
            return f"written by {context.op_type}"
        if op_type in _EMBEDDINGS:
            if not self.embeddings:
                return "read as an embedding"
            return "" if _PART in context else f"{how}, which picks rows of the variable itself"
        if op_type in _COPIES:
            rank -= _picked_axes(context) if weight.axes else 0
            return "" if rank > 1 else f"{how}, which does not pick whole matrices"
        if op_type is not None and op_type not in _PRODUCTS:
            return f"{how}, which is not a product"
        # An unknown op may take a wrapper apart, whose parts then meet the mask elsewhere.
        layout = facts_of(context).layout(_value_at(context, place))
        if op_type is None and layout not in (DENSE, SYMBOLIC):
            return f"{how}, {layout}"
        if rank < 2:
            return "a vector"
        if weight.role in _OTHER_ROLES:
            return f"{how} as {weight.role}"
        if weight.role == "left" and _RIGHT & {w.role for w in context.weights.values()}:
            return f"{how} as left"
        return ""

    def _prune(self, context: OpContext, chosen: Mapping[int | tuple[int, int], Weight]) -> None:
        places: dict[int, dict[int | None, Weight]] = {}
        for place, weight in chosen.items():
            try:
                self._take(context, weight, place)
            except NotReadableError as error:
                self._coverage.add_unreached(weight, str(error))
                continue
            position, index = (place, None) if isinstance(place, int) else place
            places.setdefault(position, {})[index] = weight
        for position, weights in places.items():
            varies = any(weight.varies for weight in weights.values())
            # If the weight varies, only the execution tells which mask the gradient needs. Then the
            # derivative of the product masks it. So it does for an item of a list, whose gradient
            # has no position of its own.
            derived = self.gradients and (varies or None not in weights)
            with autodiff_enabled() if derived else nullcontext():
                self._insert(context, position, weights, varies)
            if self.gradients and not derived:
                mask = self.masks.get(weights[None], _unknown)
                part = context.get(_PART, _whole)
                context.insert_after_backward_op(
                    multiply, grad_inputs=[position], mask=part(mask, weights[None])
                )

    def _insert(
        self,
        context: OpContext,
        position: int,
        weights: Mapping[int | None, Weight],
        varies: bool,
    ) -> None:
        if _PART not in context:
            # All of each parameter is read, so the masks are constants and may be in a graph.
            masks = {index: self.masks.get(one, _unknown) for index, one in weights.items()}
            routine, mask = (multiply, masks[None]) if None in masks else (multiply_items, masks)
            context.insert_before_op(routine, inputs=[position], mask=mask)
            return
        context.insert_before_op(
            self.prune if varies else self.masks.memoized(self.prune),
            inputs=[position],
            weights=weights,
            part=context[_PART],
            keeps=context[_KEEPS],
            context=context if varies else None,
            position=position,
        )

    def prune(
        self,
        value: Any,
        *,
        weights: Mapping[int | None, Weight],
        part: Callable[[Any, Weight], Any],
        keeps: Callable[[], bool],
        context: OpContext | None,
        position: int,
    ) -> Any:
        """Return the pruned weight for one execution, or the list that contains it."""
        if context is not None:
            weights = self._current(context, position, weights)
        new = {}
        for index, weight in weights.items():
            if keeps():
                whole = self.masks.edited(weight, self._masked(weight))
                if whole is not None:
                    new[index] = part(whole, weight)
            else:
                mask = part(self.masks.get(weight, _unknown), weight)
                new[index] = (value if index is None else value[index]) * mask
        if None in new:
            return new[None]
        if not new:
            return None
        return type(value)(new.get(index, item) for index, item in enumerate(value))

    def _current(
        self, context: OpContext, position: int, weights: Mapping[int | None, Weight]
    ) -> dict[int | None, Weight]:
        """Return the weights that this execution reads in place of those of the first one."""
        found: dict[int | None, Weight] = {}
        for index in weights:
            place = position if index is None else (position, index)
            weight = context.weights.get(place)
            if weight is not None:
                self._take(context, weight, place)
                found[index] = weight
        return found

    def _take(self, context: OpContext, weight: Weight, place: int | tuple[int, int]) -> None:
        self.masks.get(weight, self._mask_of(context, weight, place))
        self._coverage.add_reached(weight)
        self._row_of(context, weight)

    def _row_of(self, context: OpContext, weight: Weight) -> PrunedWeight:
        if weight.owner not in self._rows:
            shape = list(weight.shape)
            name = "" if weight.name.startswith("#") else weight.name
            self._rows[weight.owner] = PrunedWeight(
                context.name, context.source, shape, math.prod(shape), 0, name
            )
        return self._rows[weight.owner]

    def _masked(self, weight: Weight) -> Callable[[Any], Any]:
        def masked(parameter: Any) -> Any:
            return parameter * self.masks.get(weight, _unknown)

        return masked

    def _mask_of(
        self, context: OpContext, weight: Weight, place: int | tuple[int, int]
    ) -> Callable[[Any], Any]:
        """Return a function that makes the mask of the whole parameter that `weight` is part of."""
        make, layout = context[_MASK], weight.layout

        def mask(parameter: Any) -> Any:
            if _PART not in context:
                at = (place,) if isinstance(place, int) else place
                parameter = context.value(*at)
                if parameter is None:
                    raise NotReadableError(f"read by {context.op_type}, where its value is unknown")
            rank, axes = len(weight.shape), list(range(len(weight.shape)))
            if layout is not None and sorted(a for a in weight.axes if a is not None) == axes:
                order = [weight.axes[layout.index(axis)] for axis in _AXES if axis in layout]
                axes = [axis for axis in order if axis is not None]
            # A convolution's kernel is pruned as a whole. In other weights each matrix, such as
            # that of an expert, is pruned by itself.
            kernel = (context["type"] or "").startswith("conv")
            each = math.prod(weight.shape if kernel else weight.shape[-2:])
            count = round(self.sparsity * each)
            row = self._row_of(context, weight)
            row.pruned = count * (math.prod(weight.shape) // max(each, 1))
            with self._clock:
                return make(parameter, axes, count, 0 if kernel else max(rank - 2, 0))

        return mask

    def _prune_by_op(self, context: OpContext) -> None:
        """Prune the weight of an operator that is not known to be a parameter, by this operator."""
        if context["type"] not in _WEIGHTED:
            return
        position, layout = _weight_of(context), context.get("weight_layout")
        if position in context.weights:
            return  # It is listed with the reason.
        weight = context.value(position) if position is not None else None
        if position is None or weight is None or layout is None:
            self._result.skipped.append(context.name)
            return
        facts = context.facts
        if facts is None or not hasattr(type(weight), "__mul__"):
            why = "its tensors cannot be " + ("read" if facts is None else "multiplied")
            self._note(f"not supported on {context.namespace}: {why}")
            return
        shape = list(size_of(facts, weight))
        elements = math.prod(shape)
        count = round(self.sparsity * elements)
        axes = [layout.index(axis) for axis in _AXES if axis in layout]
        try:
            with self._clock:
                mask = context[_MASK](weight, axes, count)
        except NotReadableError as error:
            self._note(f"{context.name} is not pruned: {error}")
            return
        self._result.weights.append(
            PrunedWeight(context.name, context.source, shape, elements, count, read=elements)
        )
        context.insert_before_op(multiply, inputs=[position], mask=mask)
        if self.gradients:
            context.insert_after_backward_op(multiply, grad_inputs=[position], mask=mask)

    def result(self) -> PruneResult:
        """Return which weights are pruned so far."""
        found, coverage = self._result, self._coverage
        parameters, reached, unreached = coverage.figures()
        weights = [replace(row, read=coverage.read(owner)) for owner, row in self._rows.items()]
        return PruneResult(
            found.sparsity,
            [*weights, *found.weights],
            list(found.skipped),
            parameters,
            reached,
            unreached,
            self._clock.spent / 1e9,
            list(found.notes),
        )

    def _note(self, text: str) -> None:
        if text not in self._result.notes:
            self._result.notes.append(text)


def _unknown(parameter: Any) -> Any:
    raise LookupError("the mask of a weight that was not analysed")


def _value_at(context: OpContext, place: int | tuple[int, int]) -> Any:
    """Return the value of an input, or of an item of one that is a list."""
    inputs: Any = context.get_inputs()
    return inputs[place] if isinstance(place, int) else inputs[place[0]][place[1]]


def _whole(mask: Any, weight: Weight) -> Any:
    return mask


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
    part: Callable[[Any, Weight], Any], keeps: Callable[[], bool]
) -> Callable[[OpContext], None]:
    def rule(context: OpContext) -> None:
        context[_PART], context[_KEEPS] = part, keeps

    return rule


def _picked_by_mask(context: OpContext) -> None:
    # A slice keeps the axes of its first input but for these bits; it has no index that picks.
    if context["type"] == "slice" and "shrink_axis_mask" in context.attrs:
        context[_PICKED] = context.attrs["shrink_axis_mask"].bit_count()


def _by(mask: Callable[..., Any]) -> Callable[[OpContext], None]:
    def rule(context: OpContext) -> None:
        context[_MASK] = mask

    return rule


def _by_values(context: OpContext) -> None:
    facts = facts_of(context)

    def mask(weight: Any, axes: list[int], count: int, batch: int = 0) -> Any:
        return facts.tensor(numpy_mask(facts.values(weight), axes, count, batch), weight)

    context[_MASK] = mask


def _weight_of(context: OpContext) -> int | None:
    roles: tuple[str, ...] = context.get("input_roles", ())
    return next((roles.index(role) for role in ("weight", "right") if role in roles), None)
