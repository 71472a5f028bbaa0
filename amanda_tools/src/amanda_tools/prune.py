"""`Prune`: static pruning of weights by magnitude, on every backend with common operator types.

Owns which weights are pruned and by which mask. Mapping rules say how a framework's tensor becomes
a mask. The routine only multiplies, which all tensors can.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.action import staged
from amanda_core.activation import autodiff_enabled
from amanda_core.facts import DENSE, SYMBOLIC, NotReadableError
from amanda_core.results import Table
from amanda_core.weights.reads import Reads, Weight
from amanda_core.weights.state import WeightState
from amanda_tools.mapping import MappingTool
from amanda_tools.operators.clock import Clock
from amanda_tools.output.rendering import dataframe, format_count, format_percent, render_html
from amanda_tools.tensors.types import size_of
from amanda_tools.tensors.values import facts_of

__all__ = ["Prune", "PruneResult", "PrunedWeight", "UnreachedWeight"]

#: Common types of the operators that may multiply by a weight, in any role.
_PRODUCTS = frozenset(
    {"linear", "matmul", "grouped_matmul", "bilinear", "einsum", "rnn", "lstm", "gru"}
    | {"conv1d", "conv2d", "conv3d"}
    | {f"conv_transpose{dimensions}d" for dimensions in (1, 2, 3)}
)
#: Common types of those that always have a weight. One whose weight is not known is listed.
_WEIGHTED = _PRODUCTS - {"grouped_matmul", "bilinear", "einsum", "rnn", "lstm", "gru"}
#: Common types of the operators that copy a weight before it is multiplied by.
_COPIES = frozenset(
    {"slice", "gather", "cast", "identity", "concat", "stack", "reshape", "transpose", "split"}
    | {"expand", "repeat", "tile", "squeeze", "unsqueeze"}
)
_EMBEDDINGS = frozenset({"embedding", "embedding_bag"})
#: Roles of inputs that an operator does not multiply by as by a weight.
_OTHER_ROLES = frozenset({"bias", "addend", "input", "query", "key", "value", "mask"})
#: The order of the axes in which equal magnitudes are pruned, the same for every layout.
_AXES = "OIDHW"
#: Keys of a context. Their values are functions: one makes a mask, ``(weight, axes, count) ->
#: mask``; one takes a part of it, ``(mask, weight) -> part``; one tells if an edit may be kept.
_MASK, _PART, _KEEPS = "prune.mask", "prune.part", "prune.keeps"
_RIGHT = frozenset({"right"})
#: How many of the unreached parameters a table names; the result has all of them.
_NAMED = 4


@dataclass
class PrunedWeight:
    """A pruned weight.

    Attributes:
        op: Readable name of the first operator that uses it.
        source: ``file:line`` of the operator's call, or None.
        shape: Its shape.
        elements: How many elements it has.
        pruned: How many of them are set to zero.
        name: Its name in the model; empty for one that is known by its operator only.
        read: How many of its elements operators have read with the mask applied. Of several
            experts in one weight, these are the ones that an input was sent to.
    """

    op: str
    source: str | None
    shape: list[int]
    elements: int
    pruned: int
    name: str = ""
    read: int = 0


@dataclass
class UnreachedWeight:
    """Elements of a parameter that are not pruned.

    Attributes:
        name: Its name in the model.
        elements: How many of its elements are not pruned.
        reason: Why they are not.
    """

    name: str
    elements: int
    reason: str


@dataclass
class PruneResult:
    """Which weights are pruned.

    Attributes:
        sparsity: The requested fraction.
        weights: The weights.
        skipped: Names of operators whose weight is not known before they run, because they
            multiply two activations or because the weight is computed.
        parameters: How many elements the matrices among the parameters of the models have.
        reached: How many of these are read with the mask applied.
        unreached: The others: which parameters, how many elements, and why.
        tool_seconds: Time that making the masks took, without the multiplications in each
            execution: in a graph these are operators of the program.
        notes: What cannot be pruned, and why.
    """

    sparsity: float
    weights: list[PrunedWeight] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    parameters: int = 0
    reached: int = 0
    unreached: list[UnreachedWeight] = field(default_factory=list)
    tool_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def table(self) -> Table:
        """Return a table with a row for each weight and one for their sum."""
        rows = [(w.op, str(tuple(w.shape)), w.elements, w.pruned) for w in self.weights]
        elements = sum(w.elements for w in self.weights)
        pruned = sum(w.pruned for w in self.weights)
        parts = [f"{format_percent(pruned, elements) or 'nothing'} of the weights pruned"]
        if self.skipped:
            parts.append(
                f"{format_count(len(self.skipped), 'product')} without a known weight NOT pruned"
            )
        parts.append(f"making masks took {self.tool_seconds:.3g} s")
        if self.parameters:
            parts.append(
                f"{format_percent(self.reached, self.parameters)} of the parameters reached"
            )
        if self.unreached:
            names = [f"{u.name} ({u.elements}, {u.reason})" for u in self.unreached[:_NAMED]]
            more = len(self.unreached) - len(names)
            parts.append(f"not reached: {', '.join(names)}{f' and {more} more' * bool(more)}")
        parts += self.notes
        columns = ("op", "weight", "elements", "pruned")
        return Table("; ".join(parts), columns, [*rows, ("all", "", elements, pruned)])

    def to_json(self) -> str:
        """Return the result as JSON."""
        return json.dumps({"format": "amanda.prune/1", **asdict(self)}, indent=1)

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one row for each weight; needs pandas."""
        return dataframe(PrunedWeight, self.weights)

    def _repr_html_(self) -> str:
        return render_html([self.table()])


@staged
def multiply(value: Any, mask: Any) -> Any:
    """Set what is pruned to zero in a weight or gradient.

    It has no side effects, so it may become part of a graph.
    """
    return value * mask


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
        self._result = PruneResult(sparsity)
        self._account = Account()
        self._clock = Clock()
        self.depends_on(
            MappingTool(
                [
                    ["*", _by_values],
                    ["tensorflow", _by(numpy_mask)],
                    ["pytorch", _by(torch_mask)],
                    ["pytorch", _parts_by(torch_part, torch_keeps)],
                ]
            )
        )
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Prune the op's weights, if it has any."""
        reads = context.weights
        if not reads.supported or _PART not in context:
            self._prune_by_op(context)
            return
        self._account.add_parameters(reads)
        self.masks.watch(context)
        if not reads.consumed or context.zone != "model":
            self._list_skipped(context, bool(reads))
            return
        chosen = {}
        for place, weight in reads.items():
            reason = self._reason_against(context, place, weight)
            if reason:
                self._account.add_unreached(weight, reason)
            else:
                chosen[place] = weight
        if chosen:
            self._prune(context, chosen)
        self._list_skipped(context, bool(chosen))

    def _list_skipped(self, context: OpContext, known: bool) -> None:
        if context["type"] in _WEIGHTED and not known:
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
            return "" if self.embeddings else "read as an embedding"
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
            self._take(context, weight)
            position, index = (place, None) if isinstance(place, int) else place
            places.setdefault(position, {})[index] = weight
        for position, weights in places.items():
            varies = any(weight.varies for weight in weights.values())
            # If the weight varies, only the execution tells which mask the gradient needs. Then the
            # derivative of the product masks it. So it does for an item of a list, whose gradient
            # has no position of its own.
            derived = self.gradients and (varies or None not in weights)
            with autodiff_enabled() if derived else nullcontext():
                context.insert_before_op(
                    self.prune if varies else self.masks.memoized(self.prune),
                    inputs=[position],
                    weights=weights,
                    part=context[_PART],
                    keeps=context[_KEEPS],
                    context=context if varies else None,
                    position=position,
                )
            if self.gradients and not derived:
                mask = self.masks.get(weights[None], self._mask_of(context, weights[None]))
                context.insert_after_backward_op(
                    multiply, grad_inputs=[position], mask=context[_PART](mask, weights[None])
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
            weight = context.weights.get(position if index is None else (position, index))
            if weight is not None:
                self._take(context, weight)
                found[index] = weight
        return found

    def _take(self, context: OpContext, weight: Weight) -> None:
        self.masks.get(weight, self._mask_of(context, weight))
        self._account.add_reached(context, weight)

    def _masked(self, weight: Weight) -> Callable[[Any], Any]:
        def masked(parameter: Any) -> Any:
            return parameter * self.masks.get(weight, _unknown)

        return masked

    def _mask_of(self, context: OpContext, weight: Weight) -> Callable[[Any], Any]:
        """Return a function that makes the mask of the whole parameter that `weight` is part of."""
        make, layout = context[_MASK], weight.layout

        def mask(parameter: Any) -> Any:
            rank, axes = len(weight.shape), list(range(len(weight.shape)))
            if layout is not None and sorted(a for a in weight.axes if a is not None) == axes:
                order = [weight.axes[layout.index(axis)] for axis in _AXES if axis in layout]
                axes = [axis for axis in order if axis is not None]
            # A convolution's kernel is pruned as a whole. In other weights each matrix, such as
            # that of an expert, is pruned by itself.
            kernel = (context["type"] or "").startswith("conv")
            each = math.prod(weight.shape if kernel else weight.shape[-2:])
            count = round(self.sparsity * each)
            self._account.set_pruned(weight, count * (math.prod(weight.shape) // max(each, 1)))
            with self._clock:
                return make(parameter, axes, count, 0 if kernel else max(rank - 2, 0))

        return mask

    def _prune_by_op(self, context: OpContext) -> None:
        """Prune a weight that is known by its operator only."""
        if context["type"] not in _WEIGHTED:
            return
        position, layout = _weight_of(context), context.get("weight_layout")
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
        found, account = self._result, self._account
        parameters, reached, unreached = account.coverage()
        return PruneResult(
            found.sparsity,
            [*account.weights(), *found.weights],
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


class Account:
    """Records which parameters there are, and how much of each was read with its mask applied."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._rows: dict[str, PrunedWeight] = {}
        self._pruned: dict[str, int] = {}
        #: Owner -> parts that were read with the mask applied, and how many elements each has.
        self._parts: dict[str, dict[str, int]] = {}
        #: Owner -> reasons why it was not pruned where it was read.
        self._reasons: dict[str, dict[str, None]] = {}

    def add_parameters(self, reads: Reads) -> None:
        """Record the parameters of the running model if one of those read is new."""
        if any(weight.owner not in self._shapes for weight in reads.values()):
            self._shapes.update(reads.shapes())

    def set_pruned(self, weight: Weight, count: int) -> None:
        """Record how many elements of a parameter its mask sets to zero."""
        self._pruned[weight.owner] = count

    def add_reached(self, context: OpContext, weight: Weight) -> None:
        """Record that a part of a parameter is read with the mask applied."""
        owner = weight.owner
        self._parts.setdefault(owner, {}).setdefault(weight.key, math.prod(weight.size))
        if owner not in self._rows:
            shape, elements = list(weight.shape), math.prod(weight.shape)
            # A parameter that is not in a module has no name.
            name = weight.name if weight.root else ""
            self._shapes[owner] = weight.shape
            self._rows[owner] = PrunedWeight(context.name, context.source, shape, elements, 0, name)

    def add_unreached(self, weight: Weight, reason: str) -> None:
        """Record why a parameter is not pruned where it is read."""
        self._reasons.setdefault(weight.owner, {})[reason] = None

    def weights(self) -> list[PrunedWeight]:
        """Return the parameters that are pruned."""
        return [
            replace(row, pruned=self._pruned.get(owner, 0), read=self._read(owner))
            for owner, row in self._rows.items()
        ]

    def coverage(self) -> tuple[int, int, list[UnreachedWeight]]:
        """Return how many elements all matrices have, how many are reached, and the unreached."""
        total = reached = 0
        unreached = []
        for owner, shape in self._shapes.items():
            if len(shape) < 2:
                continue
            elements, read = math.prod(shape), self._read(owner)
            total, reached = total + elements, reached + read
            if read < elements:
                reasons = list(self._reasons.get(owner, ())) or ["not read"]
                name = owner if owner.startswith(":") else owner.partition(":")[2]
                unreached.append(UnreachedWeight(name, elements - read, "; ".join(reasons)))
        return total, reached, unreached

    def _read(self, owner: str) -> int:
        return min(sum(self._parts.get(owner, {}).values()), math.prod(self._shapes[owner]))


def _unknown(parameter: Any) -> Any:
    raise LookupError("the mask of a weight that was not analysed")


def _value_at(context: OpContext, place: int | tuple[int, int]) -> Any:
    """Return the value of an input, or of an item of one that is a list."""
    inputs: Any = context.get_inputs()
    return inputs[place] if isinstance(place, int) else inputs[place[0]][place[1]]


def _picked_axes(context: OpContext) -> int:
    """Return along how many axes of its first input a copying op picks elements."""
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


def torch_part(whole: Any, weight: Weight) -> Any:
    """Return the part of `whole` that `weight` is of its parameter; `whole` has its layout."""
    memory, seen = weight.memory, weight.seen
    if memory is None or seen is None:
        return whole
    if (memory.offset, memory.shape, memory.strides) == (seen.offset, seen.shape, seen.strides):
        return whole
    offset = whole.storage_offset() + seen.offset - memory.offset
    return whole.as_strided(seen.shape, seen.strides, offset)


def torch_keeps() -> bool:
    """Return True if what is computed now may be kept for further executions."""
    import torch

    return not torch.is_grad_enabled()


def _by(mask: Callable[..., Any]) -> Callable[[OpContext], None]:
    def rule(context: OpContext) -> None:
        context[_MASK] = mask

    return rule


def _by_values(context: OpContext) -> None:
    facts = facts_of(context)

    def mask(weight: Any, axes: list[int], count: int) -> Any:
        return numpy_mask(facts.values(weight), axes, count)

    context[_MASK] = mask


def _weight_of(context: OpContext) -> int | None:
    roles: tuple[str, ...] = context.get("input_roles", ())
    return next((roles.index(role) for role in ("weight", "right") if role in roles), None)


def numpy_mask(weight: Any, axes: list[int], count: int) -> Any:
    """Return an array like `weight`: 0 for the `count` smallest magnitudes, 1 for the others."""
    import numpy as np

    array = np.asarray(weight)
    ordered = array.transpose(axes)
    mask = np.ones(ordered.size, array.dtype)
    mask[np.argsort(np.abs(ordered), axis=None, kind="stable")[:count]] = 0
    return mask.reshape(ordered.shape).transpose(np.argsort(axes))


def torch_mask(weight: Any, axes: list[int], count: int, batch: int = 0) -> Any:
    """Return the mask as a tensor with the memory layout of `weight`.

    Args:
        weight: The weight.
        axes: Its axes in the order in which equal magnitudes are pruned.
        count: How many elements become 0 in each of the tensors along the first `batch` axes.
        batch: How many of the leading axes count separate weights.
    """
    import torch

    with torch.no_grad():
        ordered = weight.detach().permute(axes)
        magnitudes = ordered.abs().flatten(batch)
        smallest = magnitudes.argsort(stable=True, dim=-1)[..., :count]
        # Not by an index: a distributed tensor cannot be indexed by another kind of tensor.
        mask = torch.ones_like(magnitudes, dtype=weight.dtype).scatter(-1, smallest, 0)
        back = sorted(range(len(axes)), key=axes.__getitem__)
        mask = mask.reshape(ordered.shape).permute(back)
        return torch.empty_like(weight.detach()).copy_(mask)
