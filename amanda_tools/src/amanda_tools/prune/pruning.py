"""`Pruning`: the base of tools that multiply weights by masks, on every backend.

Owns which weights are pruned, how their masks are kept and applied, and what is reported. Which
elements a mask keeps is the rule of each subclass. The routine only multiplies, which all tensors
can. The module is long because weights in positions, lists, parts and copies are one decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from amanda_core import OpContext
from amanda_core.activation import autodiff_enabled
from amanda_core.facts import DENSE, SYMBOLIC, Facts, NotReadableError
from amanda_core.weights.reads import Weight
from amanda_core.weights.state import WeightState
from amanda_tools.flops.formulas import Formula, formula_of
from amanda_tools.mapping import MappingTool
from amanda_tools.operators.clock import Clock
from amanda_tools.prune.masks import (
    multiply,
    multiply_items,
    torch_keeps,
    torch_masked,
    torch_multiply,
    torch_part,
)
from amanda_tools.prune.result import PrunedWeight, PruneResult
from amanda_tools.tensors.types import size_of
from amanda_tools.tensors.values import facts_of, host, numbers
from amanda_tools.weight_copies import COPYING, Copies
from amanda_tools.weight_coverage import UnreachedWeight, WeightCoverage
from amanda_tools.weight_tool import Edit, WeightTool
from amanda_tools.weight_writes import Watch

__all__ = ["Order", "Pruning", "array_of", "axes_of", "numbers_of", "order_of"]

#: Common types of the operators that may multiply by a weight, in any role.
_PRODUCTS = frozenset(
    {"linear", "matmul", "grouped_matmul", "bilinear", "einsum", "rnn", "lstm", "gru"}
    | {"conv1d", "conv2d", "conv3d"}
    | {f"conv_transpose{dimensions}d" for dimensions in (1, 2, 3)}
)
#: Common types of those that always have a weight. One whose weight is not known is listed.
_WEIGHTED = _PRODUCTS - {"grouped_matmul", "bilinear", "einsum", "rnn", "lstm", "gru"}
#: Common types of the operators that copy a weight before it is multiplied by. Zeros of what is
#: quantized need not be zeros afterwards. What is repeated, as a table of positions is over an
#: image, is mostly added.
_COPIES = COPYING - {"dequantize", "repeat", "tile"}
_EMBEDDINGS = frozenset({"embedding", "embedding_bag"})
#: Roles of inputs that an operator does not multiply by as by a weight.
_OTHER_ROLES = frozenset({"bias", "addend", "input", "query", "key", "value", "mask"})
#: The order of the axes in which equal magnitudes are pruned, the same for every layout.
_AXES = "OIDHW"
#: Keys of a context. Their values are functions: one takes a part of a mask, ``(mask, weight) ->
#: part``; one tells if an edit may be kept. Where parameters are read as a whole, there are no
#: parts. The last value is the number of axes along which a copying op picks elements, if the index
#: does not tell.
_PART, _KEEPS, _PICKED = "prune.part", "prune.keeps", "prune.picked"
_RIGHT = frozenset({"right"})
_RECURRENT = frozenset({"rnn", "lstm", "gru"})
#: Key of a context: the formula of its cost, the sizes of its inputs, and which weights share it.
_MACS = "prune.macs"


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


class Pruning(WeightTool):
    """A tool that multiplies weights by masks.

    The weights themselves do not change: each operator gets its weight times a mask. The mask of a
    parameter is made when a part of it is first read, and then kept. Gradients of the weights are
    masked in the same way.

    A subclass overrides `keep`, which is the rule.

    Args:
        sparsity: The fraction that the result reports as requested.
        gradients: Whether to mask the gradients of the weights as well.
        embeddings: Whether to prune embedding tables where rows are picked from them.

    Attributes:
        masks: The mask of each parameter.
    """

    #: Name of the tool in its results.
    name = "prune"

    def __init__(self, sparsity: float, gradients: bool = True, embeddings: bool = False) -> None:
        super().__init__()
        self.sparsity = sparsity
        self.gradients = gradients
        self.embeddings = embeddings
        self.masks: WeightState[Any] = WeightState()
        self.states["mask"] = self.masks
        self._copies = Copies()
        self._skipped: list[str] = []
        self._notes: list[str] = []
        self._coverage = WeightCoverage()
        #: Keys of the weights that are masked where they are copied.
        self._masked_copies: set[str] = set()
        #: Owner, or operator, -> the weight that is pruned.
        self._rows: dict[str, PrunedWeight] = {}
        #: Weight or operator -> its last mask, while masks are made again.
        self.earlier: dict[str, Any] = {}
        self.arrays["earlier"] = self.earlier
        #: Ids of ops whose multiply-accumulates were counted.
        self._ops: set[int] = set()
        self._clock = Clock()
        self.depends_on(
            self._copies,
            Watch(self.masks),
            MappingTool(
                [
                    ["tensorflow", _picked_by_attributes],
                    ["pytorch", _parts_by(torch_part, torch_keeps)],
                ]
            ),
        )
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)

    def renew(self) -> None:
        """Make all masks again, in the next execution. `earlier` has the present ones."""
        kept = zip(self.masks, self.masks.saved().values(), strict=True)
        self.earlier.update({owner: self.array(owner, mask) != 0 for owner, mask in kept})
        self.earlier.update(self.by_op)
        self.masks.load({})
        self.by_op.clear()
        self.invalidate()

    # The rule.

    def keep(self, values: Any, order: Order, key: str) -> Any:
        """Return which elements are kept.

        Args:
            values: The weight as a NumPy array, with its axes in the order of `order`.
            order: The meaning of the axes.
            key: Identifies the weight.

        Returns:
            An array of bools of the same shape.
        """
        raise NotImplementedError

    def refuses(self, shape: tuple[int, ...], order: Order) -> str:
        """Return why a weight of this shape is not pruned, or an empty string.

        Args:
            shape: Its shape with the axes in the order of `order`.
            order: The meaning of the axes.
        """
        return ""

    def mask(self, context: OpContext, tensor: Any, order: Order, key: str) -> tuple[Any, int]:
        """Return the mask of a tensor, and how many elements it sets to zero."""
        kept = self.keep(array_of(context, tensor).transpose(order.axes), order, key)
        kept = kept.transpose(_inverse(order.axes))
        return facts_of(context).cast(kept, tensor), int(kept.size - kept.sum())

    def insert(
        self, context: OpContext, position: int, weights: Mapping[int | None, Weight]
    ) -> bool:
        """Insert an edit of another kind at a position; return False to multiply by the masks."""
        return False

    def analyse(self, context: OpContext) -> None:
        """Prune the op's weights, if it has any."""
        if not self.meets(context):
            return
        reads = context.weights
        self._coverage.add_parameters(reads, context.zone)
        if not reads.supported:
            self._prune_by_op(context)
            return
        self._note_other_readers(context)
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

    def _note_other_readers(self, context: OpContext) -> None:
        """Say where a masked copy of a weight is not multiplied by."""
        op_type = context["type"]
        if op_type is None or op_type in _PRODUCTS | _COPIES | _EMBEDDINGS:
            return
        copies = self._copies.reads(context) if self._masked_copies else {}
        for weight in (weight for weights in copies.values() for weight in weights):
            if weight.key in self._masked_copies:
                how = f"{context.op_type}, which is not a product"
                self._note(f"{weight.name} is also masked where a copy is read by {how}")

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
            if not isinstance(place, int) and not self._is_of_weights(context, position):
                return f"{how}, with values that are not weights"
            rank -= _picked_axes(context) if weight.axes else 0
            if rank <= 1:
                return f"{how}, which does not pick whole matrices"
            order = order_of(context, weight)
            return self.refuses(tuple(weight.shape[axis] for axis in order.axes), order)
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
        order = order_of(context, weight)
        return self.refuses(tuple(weight.shape[axis] for axis in order.axes), order)

    def _is_of_weights(self, context: OpContext, position: int) -> bool:
        """Return True if all tensors of a list are weights, or copies of some."""
        items = range(len(list(context.get_inputs() or ())[position]))
        copies = self._copies.reads(context)
        return all((position, n) in context.weights or (position, n) in copies for n in items)

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
        owners = {weight.owner for weights in places.values() for weight in weights.values()}
        total = sum(self._rows[owner].elements for owner in owners)
        self._counted(context, {o: self._rows[o].elements / (total or 1) for o in owners})
        if context["type"] in _COPIES:
            self._masked_copies.update(weight.key for weight in chosen.values())
        for position, weights in places.items():
            if self.insert(context, position, weights):
                continue
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
                    torch_multiply if _PART in context else multiply,
                    grad_inputs=[position],
                    mask=part(mask, weights[None]),
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
                new[index] = torch_multiply(value if index is None else value[index], mask)
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
            return torch_masked(parameter, self.masks.get(weight, _unknown))

        return masked

    def _mask_of(
        self, context: OpContext, weight: Weight, place: int | tuple[int, int]
    ) -> Callable[[Any], Any]:
        """Return a function that makes the mask of the whole parameter that `weight` is part of."""

        def mask(parameter: Any) -> Any:
            if _PART not in context:
                at = (place,) if isinstance(place, int) else place
                parameter = context.value(*at)
                if parameter is None:
                    raise NotReadableError(f"read by {context.op_type}, where its value is unknown")
            row, loaded = self._row_of(context, weight), self.claimed("mask", weight)
            if loaded is not None:
                row.pruned = int(loaded.size - (loaded != 0).sum())
                return facts_of(context).cast(loaded, parameter)
            with self._clock:
                new, row.pruned = self.mask(
                    context, parameter, order_of(context, weight), weight.owner
                )
            return new

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
            self._skipped.append(context.name)
            return
        facts = context.facts
        if facts is None or not hasattr(type(weight), "__mul__"):
            why = "its tensors cannot be " + ("read" if facts is None else "multiplied")
            self._note(f"not supported on {context.namespace}: {why}")
            return
        shape = size_of(facts, weight)
        axes = [layout.index(axis) for axis in _AXES if axis in layout]
        rest = [axis for axis in range(len(shape)) if axis not in axes]
        kernel = context["type"].startswith("conv")
        order = Order([*rest, *axes], 0, not rest, kernel)
        reason = self.refuses(tuple(shape[axis] for axis in order.axes), order)
        if reason:
            self._note(f"{context.name} is not pruned: {reason}")
            return
        key = f"{context.name}#{context.get_op_id()}"
        loaded = self.by_op.get(key)
        row = PrunedWeight(context.name, context.source, list(shape), math.prod(shape), 0)
        row.read = row.elements
        try:
            with self._clock:
                if loaded is not None:
                    row.pruned = int(loaded.size - (loaded != 0).sum())
                    mask = facts.cast(loaded, weight)
                else:
                    mask, row.pruned = self.mask(context, weight, order, key)
                    self.by_op[key] = array_of(context, mask) != 0
        except NotReadableError as error:
            self._note(f"{context.name} is not pruned: {error}")
            return
        self._rows[key] = row
        self._counted(context, {key: 1.0})
        context.insert_before_op(multiply, inputs=[position], mask=mask)
        if self.gradients:
            context.insert_after_backward_op(multiply, grad_inputs=[position], mask=mask)

    def _counted(self, context: OpContext, shares: Mapping[str, float]) -> None:
        """Note that the multiply-accumulates of an op are shared by weights of these rows."""
        formula = formula_of(context["type"], context) if context["type"] in _PRODUCTS else None
        if isinstance(formula, Formula):
            inputs, facts = context.get_inputs() or (), facts_of(context)
            try:
                sizes = tuple(size_of(facts, inputs[place]) for place in formula.inputs)
            except (IndexError, ValueError):
                return
            context[_MACS] = formula, sizes, shares

    def analyse_outputs(self, context: OpContext) -> None:
        """Count the multiply-accumulates of an op that reads pruned weights."""
        if _MACS not in context or context.get_op_id() in self._ops:
            return
        formula, sizes, shares = context[_MACS]
        facts, outputs = facts_of(context), context.get_outputs() or ()
        try:
            macs = formula.count(sizes, tuple(size_of(facts, value) for value in outputs))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return  # A shape is not known before the graph runs.
        self._ops.add(context.get_op_id())
        for key, share in shares.items():
            self._rows[key].macs += round(macs * share)

    def options(self) -> dict[str, Any]:
        """Return what decides which elements are pruned."""
        return {"sparsity": self.sparsity}

    def check_kept(self, name: str, kept: Any, shape: tuple[int, ...]) -> str:
        """Return why an array is not a mask for a parameter of a shape, or an empty string."""
        import numpy

        size = numpy.shape(kept)
        return "" if size == shape else f"its shape is {size}, and that of the parameter {shape}"

    def read_otherwise(self) -> list[UnreachedWeight]:
        """Return the weights that are masked where they are read, but not everywhere."""
        return self._coverage.read_otherwise()

    def baked(self, weight: Weight) -> Edit | None:
        """Return the multiplication by the mask."""
        mask = dict(zip(self.masks, self.masks.saved().values(), strict=True)).get(weight.owner)
        return None if mask is None else lambda values: values * mask

    def result(self) -> PruneResult:
        """Return which weights are pruned so far."""
        coverage = self._coverage
        weights = [
            row if row.read else replace(row, read=coverage.read(owner))
            for owner, row in self._rows.items()
        ]
        return PruneResult(
            self.sparsity,
            weights,
            list(self._skipped),
            *coverage.figures(),
            read_otherwise=self.read_otherwise(),
            tool_seconds=self._clock.spent / 1e9,
            notes=list(self._notes),
            tool=self.name,
        )

    def unreach(self, weight: Weight, reason: str) -> None:
        """List a weight as not reached."""
        self._coverage.add_unreached(weight, reason)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


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


def _weight_of(context: OpContext) -> int | None:
    roles: tuple[str, ...] = context.get("input_roles", ())
    return next((roles.index(role) for role in ("weight", "right") if role in roles), None)


def array_of(context: OpContext, tensor: Any) -> Any:
    """Return the numbers of a tensor as a NumPy array."""
    return numbers_of(facts_of(context), tensor)


def numbers_of(facts: Facts, tensor: Any) -> Any:
    """Return the numbers of a tensor as a NumPy array."""
    copy = host(facts, tensor)
    return numbers(copy.array, copy.dtype)


def _inverse(axes: list[int]) -> list[int]:
    return sorted(range(len(axes)), key=axes.__getitem__)


def axes_of(weight: Weight) -> list[int | None]:
    """Return the parameter's axis of each axis of the input, also of those with one element."""
    axes, inner = list(weight.axes), [n for n, i in enumerate(weight.region) if isinstance(i, int)]
    free = [axis for axis in range(len(weight.shape)) if axis not in axes and axis not in inner]
    # Nothing in memory tells the axis of one element, but if all others are known, it is left over.
    if axes.count(None) == len(free) and weight.exact:
        axes = [free.pop(0) if axis is None else axis for axis in axes]
    return axes


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
    axes = [letters[letter] for letter in _AXES if letter in letters]
    known = "O" in letters and "I" in letters and "M" not in letters
    natural = list(range(rank))
    if not known and len(axes) != rank:
        axes = natural
    order = [*(axis for axis in natural if axis not in axes), *axes]
    return Order(order, 0 if kernel else max(rank - 2, 0), known, kernel)
