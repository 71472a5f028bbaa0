"""`CollectivePruning`: the base of rules that compare several weights, and of schedules.

Owns when masks are made: weights are seen in one execution of the model, and the masks that were
made of all of them apply from the next one on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amanda_core import OpContext
from amanda_tools.prune.pruning import Order, Pruning, array_of
from amanda_tools.tensors.values import facts_of

__all__ = ["CollectivePruning"]


class CollectivePruning(Pruning):
    """A tool whose masks depend on several weights, or change with the steps of the optimizer.

    A subclass overrides `decide`, and `fraction` and `is_due` if it has a schedule. One that makes
    each mask by itself overrides `mask`.

    Args:
        sparsity: The fraction that the result reports as requested.
        collective: Whether masks depend on several weights.
        scheduled: Whether they change with the steps.
        gradients: Whether to mask the gradients of the weights as well.
        embeddings: Whether to prune embedding tables where rows are picked from them.
    """

    def __init__(
        self,
        sparsity: float,
        collective: bool,
        scheduled: bool,
        gradients: bool = True,
        embeddings: bool = False,
    ) -> None:
        super().__init__(sparsity, gradients, embeddings)
        self._collective = collective
        self._step = 0
        self.present = self.fraction(0)
        #: Weight -> its magnitudes in the last analysis, the order that their axes have, and the
        #: mask that was made of all of them.
        self._magnitudes: dict[str, Any] = {}
        self._orders: dict[str, Order] = {}
        self._ready: dict[str, Any] = {}
        self._unsettled = False
        if collective:
            self.states.clear()
            self.arrays["ready"] = self._ready
            # Not when a call ends: its backward may still run parts of it again.
            self.add_inst_for_call(begin=lambda call: self._settle())
        if collective or scheduled:
            self.add_inst_for_step(end=self._end_step)

    def decide(self, magnitudes: Mapping[str, Any], orders: Mapping[str, Order]) -> dict[str, Any]:
        """Return which elements of each weight are kept, at the fraction `present`.

        Args:
            magnitudes: The absolute values by weight, with the axes in the order of `orders`.
            orders: The meaning of the axes.
        """
        raise NotImplementedError

    def fraction(self, step: int) -> float:
        """Return the fraction that is pruned after a number of steps of the optimizer."""
        return self.sparsity

    def is_due(self, step: int) -> bool:
        """Return True if masks are made again at the end of this step, counted from 1."""
        return False

    def mask(self, context: OpContext, tensor: Any, order: Order, key: str) -> tuple[Any, int]:
        """Return the mask of a tensor, and how many elements it sets to zero."""
        import numpy as np

        facts, ready = facts_of(context), self._ready.get(key)
        array = array_of(context, tensor)
        kept = np.ones(array.shape, bool) if ready is None else ready
        self._magnitudes[key] = np.abs(array * kept).transpose(order.axes)
        self._orders[key] = order
        self._unsettled |= ready is None
        return facts.cast(kept, tensor), int(kept.size - kept.sum())

    def progress(self) -> dict[str, Any]:
        """Return the number of steps, and the present fraction."""
        return {"step": self._step, "present": self.present}

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from the result of `progress`."""
        self._step, self.present = progress["step"], progress["present"]

    def remaining(self, context: OpContext, tensor: Any, key: str) -> Any:
        """Return a weight without what was pruned by its last mask."""
        earlier = self.earlier.get(key)
        return tensor if earlier is None else tensor * facts_of(context).cast(earlier, tensor)

    def _end_step(self, number: int) -> None:
        self._step += 1
        if self.is_due(self._step):
            self.present = self.fraction(self._step)
            self._unsettled = self._collective
            if not self._collective:
                self.renew()
        self._settle()
        if self._collective and self.is_due(self._step + 1):
            self.renew()  # So that the next execution shows the magnitudes.

    def _settle(self) -> None:
        """Make all masks, if new weights were found or the fraction has changed."""
        if not self._unsettled:
            return
        self._unsettled = False
        with self._clock:
            kept = self.decide(self._magnitudes, self._orders)
            for key, mask in kept.items():
                axes = self._orders[key].axes
                back = sorted(range(len(axes)), key=axes.__getitem__)
                self._ready[key] = mask.transpose(back).copy()
        self.renew()
