"""`PruneNM`: N of every M consecutive weights are kept, the form that sparse tensor cores multiply.

Owns the rule, the sizes that it applies to, and the gradient of SR-STE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from amanda_core import OpContext
from amanda_core.interface.facts import Facts
from amanda_core.weights.reads import Weight
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.kit.weights.tool import Edit
from amanda_tools.prune.order import Order, axes_of, numbers_of, order_of
from amanda_tools.prune.scores import Score, ScoredPruning, check_choice

__all__ = ["PruneNM"]

Method = Literal["fixed", "sr_ste"]
Sizes = Literal["any", "apex"]


class PruneNM(ScoredPruning):
    """Keeps the `n` largest of every `m` consecutive weights along the input channels.

    Method `fixed` makes each mask once and masks the gradient, as ASP in NVIDIA's Apex does. Method
    `sr_ste` makes the mask in each execution from the present weight. Its gradient stays dense, and
    what is pruned decays: ``g + decay * (1 - mask) * w`` (Zhou et al., 2021).

    Args:
        n: How many are kept, from 1 to `m`.
        m: How many are compared.
        method: `fixed` or `sr_ste`.
        sizes: Which weights are pruned: `any` whose input channels are a multiple of `m`, or as
            `apex` does, those with a multiple of 8 outputs and of 16 inputs.
        decay: The factor of SR-STE.
        score: What fixed masks compare: the `magnitude` of elements, or `taylor`, the squares of
            their products with their gradients. The first execution is then not pruned.

    Attributes:
        masks: The mask of each parameter, if they are fixed.

    Raises:
        ValueError: An option is not in its range.

    >>> tool = PruneNM(2, 4)
    """

    name = "prune_nm"
    saved = ("n", "m", "method", "sizes", "decay", "score")

    def __init__(
        self,
        n: int = 2,
        m: int = 4,
        method: Method = "fixed",
        sizes: Sizes = "any",
        decay: float = 2e-4,
        score: Score = "magnitude",
    ) -> None:
        if not 1 <= n <= m:
            raise ValueError(f"n must be from 1 to m, but n is {n} and m is {m}")
        check_choice("method", method, Method)
        check_choice("sizes", sizes, Sizes)
        if method == "sr_ste" and score != "magnitude":
            raise ValueError("sr_ste makes masks in each execution, before there are gradients")
        super().__init__(1 - n / m, score=score)
        self.n, self.m, self.method, self.sizes, self.decay = n, m, method, sizes, decay
        #: Owner -> the order of its axes, and the facts about its tensors, with SR-STE.
        self._orders: dict[str, tuple[Order, Facts]] = {}
        if method == "sr_ste":
            self.states.clear()  # Nothing is kept from step to step.

    def refuses(self, shape: tuple[int, ...], order: Order) -> str:
        """Return why a weight of this shape is not pruned, or an empty string."""
        if not order.known:
            return "which of its axes is the input's is not known"
        outputs, inputs = shape[-2:] if not order.kernel else shape[:2]
        if self.sizes == "apex" and (outputs % 8 or inputs % 16):
            return f"{outputs} x {inputs} channels are not multiples of 8 and 16"
        return f"{inputs} input channels are not a multiple of {self.m}" if inputs % self.m else ""

    def decide(self, scores: Mapping[str, Any], orders: Mapping[str, Order]) -> dict[str, Any]:
        """Return which elements are kept; of equal scores the first ones are pruned."""
        import numpy as np

        found = {}
        for key, values in scores.items():
            axis = 1 if orders[key].kernel else values.ndim - 1
            moved = np.moveaxis(values, axis, -1)
            groups = moved.reshape(*moved.shape[:-1], -1, self.m)
            kept = np.ones(groups.shape, bool)
            smallest = np.argsort(groups, axis=-1, kind="stable")[..., : self.m - self.n]
            np.put_along_axis(kept, smallest, False, axis=-1)
            found[key] = np.moveaxis(kept.reshape(moved.shape), -1, axis)
        return found

    def insert(
        self, context: OpContext, position: int, weights: Mapping[int | None, Weight]
    ) -> bool:
        """Insert the edits of SR-STE, if that is the method."""
        if self.method == "fixed":
            return super().insert(context, position, weights)
        weight = weights.get(None)
        arranged = None if weight is None else self._arrangement(context, weight)
        if facts_of(context).placement(context.value(position)) is not None:
            arranged = None  # A group may be split between processes.
        if weight is None or arranged is None:
            for each in weights.values():
                self.unreach(each, "a part that SR-STE cannot edit")
            return True
        facts, order = facts_of(context), order_of(context, weight)
        self._orders[weight.owner] = order, facts
        pruned: dict[str, Any] = {}
        context.insert_before_op(
            self.sparsify,
            inputs=[position],
            facts=facts,
            order=arranged,
            pruned=pruned,
        )
        if self.sees_gradients(context, "without the decay of pruned weights"):
            context.insert_after_backward_op(self.regularize, grad_inputs=[position], pruned=pruned)
        return True

    def sparsify(self, value: Any, facts: Facts, order: Order, pruned: dict[str, Any]) -> Any:
        """Return the weight of one execution with the smallest of each group set to zero."""
        array = numbers_of(facts, value)
        kept = self._kept(array, order)
        pruned["values"] = facts.cast(array * ~kept, value)
        return value * facts.cast(kept, value)

    def regularize(self, gradient: Any, pruned: dict[str, Any]) -> Any:
        """Return the gradient with the decay of what was pruned in the last execution."""
        return gradient + self.decay * pruned["values"]

    def baked(self, weight: Weight) -> Edit | None:
        """Return the multiplication by the mask."""
        if self.method == "fixed" or weight.owner not in self._orders:
            return super().baked(weight)
        order, facts = self._orders[weight.owner]

        def edit(values: Any) -> Any:
            return values * facts.cast(self._kept(numbers_of(facts, values), order), values)

        return edit

    def _kept(self, array: Any, order: Order) -> Any:
        kept = self.decide({"": order.arrange(abs(array))}, {"": order})[""]
        return order.restore(kept, array.shape)

    def _arrangement(self, context: OpContext, weight: Weight) -> Order | None:
        """Return how the axes of the input are arranged, or None if groups are cut."""
        order = order_of(context, weight)
        first = order.batch + order.outputs
        cut = any(
            axis < len(weight.region) and weight.region[axis] != slice(None)
            for axis in order.axes[first : first + order.inputs]
        )
        axes = axes_of(weight)
        if cut or not weight.exact or None in axes:
            return None
        batch = sum(axis in axes for axis in order.axes[: order.batch])
        arranged = [axes.index(axis) for axis in order.axes if axis in axes]
        return order._replace(axes=arranged, batch=batch)
