"""`Pruning`: the base of tools that multiply weights by masks, on every backend.

Owns how masks are kept and applied to what operators read. `reads` says which weights are pruned,
and `scores` makes masks. The routine only multiplies, which all tensors can. A little over
400 lines: one class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from amanda_core import OpContext
from amanda_core.engine.activation import autodiff_enabled
from amanda_core.interface.facts import NotReadableError
from amanda_core.weights.reads import Weight
from amanda_core.weights.state import WeightState
from amanda_tools.kit.operators.clock import Clock
from amanda_tools.kit.tensors.types import size_of
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.kit.weights.copies import Copies
from amanda_tools.kit.weights.coverage import UnreachedWeight, WeightCoverage
from amanda_tools.kit.weights.ranking import Kept
from amanda_tools.kit.weights.tool import Edit, WeightTool
from amanda_tools.kit.weights.writes import Watch
from amanda_tools.prune.macs import MacCount
from amanda_tools.prune.masks import multiply, multiply_items, torch_masked, torch_multiply
from amanda_tools.prune.order import AXES, Order, array_of, order_of
from amanda_tools.prune.reads import (
    COPIES,
    EMBEDDINGS,
    KEEPS,
    PART,
    PRODUCTS,
    WEIGHTED,
    is_saved,
    reason_against,
    rules,
    weight_of,
)
from amanda_tools.prune.result import PrunedWeight, PruneResult

__all__ = ["Pruning"]


class Pruning(WeightTool):
    """A tool that multiplies weights by masks.

    The weights themselves do not change: each operator gets its weight times a mask. The mask of a
    parameter is made when a part of it is first read, and then kept. Gradients of the weights are
    masked in the same way.

    A subclass overrides `mask`.

    Args:
        sparsity: The fraction that the result reports as requested.
        gradients: Whether to mask the gradients of the weights as well.
        embeddings: Whether to prune embedding tables where rows are picked from them.

    Attributes:
        masks: The mask of each parameter.
    """

    #: Name of the tool in its results.
    name = "prune"
    words = ("pruned", "unpruned")

    def __init__(self, sparsity: float, gradients: bool = True, embeddings: bool = False) -> None:
        super().__init__()
        self.sparsity = sparsity
        self.gradients = gradients
        self.embeddings = embeddings
        self.masks: WeightState[Any] = WeightState()
        self.states["mask"] = self.masks
        #: Owner -> the weight that was last read under this name.
        self._weights: dict[str, Weight] = {}
        self._copies = Copies()
        self._skipped: dict[str, None] = {}
        self._notes: list[str] = []
        self._coverage = WeightCoverage(self)
        #: The operators whose weights stay as they are.
        self.kept = Kept()
        #: Keys of the weights that are masked where they are copied.
        self._masked_copies: set[str] = set()
        #: Owner, or operator, -> the weight that is pruned.
        self._rows: dict[str, PrunedWeight] = {}
        #: Weight or operator -> its last mask, while masks are made again.
        self.earlier: dict[str, Any] = {}
        self.arrays["earlier"] = self.earlier
        #: Owner -> where compiled programs read the weight, which have its mask as a constant.
        self._woven: dict[str, tuple[OpContext, Weight, int | tuple[int, int]]] = {}
        #: Owners of the weights that are pruned elsewhere, too.
        self._not_woven: set[str] = set()
        self._macs = MacCount()
        self._clock = Clock()
        self.depends_on(self._copies, Watch(self.masks), rules())
        self.add_inst_for_op(self.analyse)
        count = self._macs.count
        self.add_inst_for_op(lambda op: count(op, self._rows), require_outputs=True)

    def renew(self) -> None:
        """Make all masks again, in the next execution. `earlier` has the present ones.

        Those that only compiled programs have are made at once, and changed in place, so that
        nothing is compiled again.
        """
        kept = zip(self.masks, self.masks.saved().values(), strict=True)
        self.earlier.update({owner: self.array(owner, mask) != 0 for owner, mask in kept})
        self.earlier.update(self.by_op)
        if self._renew_in_place():
            return
        self.masks.load({})
        self.by_op.clear()
        self._woven.clear()
        self._not_woven.clear()
        self.invalidate()

    def _renew_in_place(self) -> bool:
        """Change the masks of compiled programs; return False if there are others."""
        owners = set(self.masks)
        if self.by_op or not owners or not owners <= self._woven.keys() - self._not_woven:
            return False
        new = []
        for owner in owners:
            context, weight, place = self._woven[owner]
            facts, mask = facts_of(context), self.masks.get(weight, _unknown)
            parameter = weight.parameter
            if parameter is None or facts.placement(mask) or facts.version(mask) is None:
                return False
            new.append((facts, mask, self._mask_of(context, weight, place)(parameter)))
        for facts, mask, values in new:
            facts.update(mask, _replacing(values))
        return True

    def forget(self, owner: str) -> None:
        """Drop what masks are made of, since the parameter has died."""
        self.earlier.pop(owner, None)
        self._woven.pop(owner, None)

    # The rule.

    def refuses(self, shape: tuple[int, ...], order: Order) -> str:
        """Return why a weight of this shape is not pruned, or an empty string.

        Args:
            shape: Its shape with the axes in the order of `order`.
            order: The meaning of the axes.
        """
        return ""

    def mask(self, context: OpContext, tensor: Any, order: Order, key: str) -> tuple[Any, int]:
        """Return the mask of a tensor, and how many elements it sets to zero.

        Args:
            context: The operator that reads the weight.
            tensor: The whole weight.
            order: The meaning of its axes.
            key: Identifies the weight.
        """
        raise NotImplementedError

    def without_mask(self) -> Collection[str]:
        """Return the owners of weights that were read and never had a mask."""
        return ()

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
        self.kept.has(context)
        self._coverage.add_parameters(reads, context.zone, context.name)
        if not reads.supported:
            self._prune_by_op(context)
            return
        self._note_other_readers(context)
        if not reads.consumed or context.zone != "model":
            self._list_skipped(context, bool(reads))
            return
        chosen = {}
        for place, weight in reads.items():
            reason = reason_against(context, place, weight, self._copies, self.embeddings)
            if weight.owner in self.kept.weights:
                reason = self.kept.reason
            if reason := reason or self._refused(context, weight):
                self._coverage.add_unreached(weight, reason)
            elif not is_saved(context, place, weight):
                chosen[place] = weight
        if chosen:
            self._prune(context, chosen)
        self._list_skipped(context, bool(chosen))

    def _note_other_readers(self, context: OpContext) -> None:
        """Say where a masked copy of a weight is not multiplied by."""
        op_type = context["type"]
        if op_type is None or op_type in PRODUCTS | COPIES | EMBEDDINGS:
            return
        copies = self._copies.reads(context) if self._masked_copies else {}
        for weight in (weight for weights in copies.values() for weight in weights):
            if weight.key in self._masked_copies:
                how = f"{context.op_type}, which is not a product"
                self._note(f"{weight.name} is also masked where a copy is read by {how}")

    def _list_skipped(self, context: OpContext, known: bool) -> None:
        # Copies of weights were pruned where they were made, or are listed as not reached.
        if context["type"] in WEIGHTED and not known and not self._copies.reads(context):
            self._prune_by_op(context)

    def _refused(self, context: OpContext, weight: Weight) -> str:
        order = order_of(context, weight)
        return self.refuses(order.shape(weight.shape), order)

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
        self._macs.expect(context, {o: self._rows[o].elements / (total or 1) for o in owners})
        if context["type"] in COPIES:
            self._masked_copies.update(weight.key for weight in chosen.values())
        for position, weights in places.items():
            if self.insert(context, position, weights):
                continue
            varies = any(weight.varies for weight in weights.values())
            # If the weight varies, only the execution tells which mask the gradient needs. Then the
            # derivative of the product masks it. So it does for an item of a list, whose gradient
            # has no position of its own.
            derived = self.gradients and (varies or None not in weights)
            derived = derived and context.supports("autodiff")
            with autodiff_enabled() if derived else nullcontext():
                self._insert(context, position, weights, varies)
            if self.gradients and not derived and self.sees_gradients(context, "not masked"):
                mask = self.masks.get(weights[None], _unknown)
                part = context.get(PART, lambda mask, weight: mask)
                context.insert_after_backward_op(
                    torch_multiply if KEEPS in context else multiply,
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
        compiled = context.namespace.endswith("/compiled")
        if compiled and not varies and None in weights:
            self._woven[weights[None].owner] = context, weights[None], position
        else:
            self._not_woven.update(weight.owner for weight in weights.values())
        is_kept = KEEPS in context
        varies = varies and (is_kept or context.supports("eager"))
        times = torch_multiply if is_kept else multiply
        if not varies and (not is_kept or compiled or self.is_exported):
            # The masks are constants and may be in a graph.
            part = context.get(PART, lambda mask, weight: mask)
            masks = {i: part(self.masks.get(one, _unknown), one) for i, one in weights.items()}
            routine, mask = (times, masks[None]) if None in masks else (multiply_items, masks)
            context.insert_before_op(routine, inputs=[position], mask=mask)
            return
        # A weight that is read as it lies need not be looked up: the edit is a product.
        weight = weights.get(None)
        is_whole = weight is not None and weight.seen is not None and weight.seen == weight.memory
        fresh = None
        if weight is not None and is_whole and not varies:
            fresh = partial(torch_masked, mask=self.masks.get(weight, _unknown))
        context.insert_before_op(
            self.prune if varies else self.masks.memoized(self.prune, fresh),
            inputs=[position],
            weights=weights,
            part=context.get(PART, lambda mask, weight: mask),
            keeps=context.get(KEEPS, bool),
            times=times,
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
        times: Callable[[Any, Any], Any],
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
                old = value if index is None else value[index]
                new[index] = times(old, mask)
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
        known = self._weights.get(weight.owner)
        if known is not None and known.parameter is not weight.parameter:
            self._rows.pop(weight.owner, None)
            self.forget(weight.owner)
        self._weights[weight.owner] = weight
        if self.masks.get(weight, self._mask_of(context, weight, place)) is None:
            raise NotReadableError(f"read by {context.op_type}, where its value is unknown")
        self._coverage.add_reached(weight)
        self._row_of(context, weight)

    def _row_of(self, context: OpContext, weight: Weight) -> PrunedWeight:
        if weight.owner not in self._rows:
            name = "" if weight.name.startswith("#") else weight.name
            self._rows[weight.owner] = PrunedWeight.of(context, weight.shape, name)
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
            if PART not in context:
                at = (place,) if isinstance(place, int) else place
                parameter = context.value(*at)
                if parameter is None:
                    raise NotReadableError(f"read by {context.op_type}, where its value is unknown")
            row, loaded = self._row_of(context, weight), self.claimed("mask", weight)
            if loaded is not None:
                row.pruned = int(loaded.size - (loaded != 0).sum())
                return facts_of(context).cast(loaded, parameter)
            with self._clock:
                facts = facts_of(context)
                if parameter is weight.parameter:
                    whole = facts.master(parameter, context.weights.model(weight.root))
                else:
                    whole = facts.whole(parameter)
                new, row.pruned = self.mask(context, whole, order_of(context, weight), weight.owner)
            return new if whole is parameter else facts.cast(new, parameter)

        return mask

    def _prune_by_op(self, context: OpContext) -> None:
        """Prune the weight of an operator that is not known to be a parameter, by this operator."""
        if context["type"] not in WEIGHTED:
            return
        if self.kept.has(context):
            self._note(f"{context.name}: {self.kept.reason}")
            return
        position, layout = weight_of(context), context.get("weight_layout")
        if position in context.weights:
            return  # It is listed with the reason.
        weight = context.value(position) if position is not None else None
        if position is None or weight is None or layout is None:
            self._skipped[context.name] = None
            return
        facts = context.facts
        if facts is None or not hasattr(type(weight), "__mul__"):
            why = "its tensors cannot be " + ("read" if facts is None else "multiplied")
            self._note(f"not supported on {context.namespace}: {why}")
            return
        shape = size_of(facts, weight)
        axes = [layout.index(axis) for axis in AXES if axis in layout]
        rest = [axis for axis in range(len(shape)) if axis not in axes]
        kernel = context["type"].startswith("conv")
        order = Order([*rest, *axes], 0, not rest, kernel)
        reason = self.refuses(order.shape(shape), order)
        if reason:
            self._note(f"{context.name} is not pruned: {reason}")
            return
        key = f"{context.name}#{context.get_op_id()}"
        loaded = self.by_op.get(key)
        row = PrunedWeight.of(context, shape)
        row.read = row.elements
        try:
            with self._clock:
                if loaded is not None:
                    row.pruned = int(loaded.size - (loaded != 0).sum())
                    mask = facts.cast(loaded, weight)
                else:
                    mask, row.pruned = self.mask(context, facts.whole(weight), order, key)
                    mask = facts.cast(mask, weight)
                    self.by_op[key] = array_of(context, mask) != 0
        except NotReadableError as error:
            self._note(f"{context.name} is not pruned: {error}")
            return
        self._rows[key] = row
        if context.weights.supported and not context.module_path:
            self._note(
                f"on {context.namespace} weights outside of modules are not known by name: a mask "
                "belongs to an operator, and all iterations of a loop share it"
            )
        self._macs.expect(context, {key: 1.0})
        context.insert_before_op(multiply, inputs=[position], mask=mask)
        if self.gradients and self.sees_gradients(context, "not masked"):
            context.insert_after_backward_op(multiply, grad_inputs=[position], mask=mask)

    def sees_gradients(self, context: OpContext, otherwise: str) -> bool:
        """Return True if gradients of inputs can be edited; note what happens otherwise."""
        if context.supports("aligned_gradients"):
            return True
        self._note(f"gradients are {otherwise} on {context.namespace}, which does not show them")
        return False

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
        if mask is None:
            return None
        _, facts = self._met[weight.owner]
        return lambda values: values * facts.whole(mask)

    def result(self) -> PruneResult:
        """Return which weights are pruned so far."""
        coverage = self._coverage
        for owner in self.without_mask():
            coverage.add_unchanged(owner, "gone when its mask was to be made")
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
            notes=[*self._notes, *self.kept.notes()],
            tool=self.name,
        )

    def unreach(self, weight: Weight, reason: str) -> None:
        """List a weight as not reached."""
        self._coverage.add_unreached(weight, reason)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def _replacing(values: Any) -> Callable[[Any], Any]:
    return lambda _: values


def _unknown(parameter: Any) -> Any:
    raise LookupError("the mask of a weight that was not analysed")
