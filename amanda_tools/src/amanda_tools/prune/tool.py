"""`Prune`: pruning by magnitude, by matrix, weight, layer or over the whole model, with a schedule.

Owns the number of elements that each weight loses. Mapping rules say how a framework's tensor
becomes a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from amanda_core import OpContext
from amanda_tools.kit.mapping import MappingTool
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.kit.weights.ranking import chosen
from amanda_tools.prune.masks import numpy_mask, torch_mask
from amanda_tools.prune.order import Order, array_of
from amanda_tools.prune.scores import Score, ScoredPruning, check_choice

__all__ = ["Prune", "Scope"]

#: What the fraction is of: each matrix by itself, each parameter, each module's, or all of them.
Scope = Literal["matrix", "weight", "layer", "global"]
#: Key of a context: makes a mask, ``(weight, axes, count, batch) -> mask``.
_MASK = "prune.mask"


class Prune(ScoredPruning):
    """Sets the smallest weights of convolutions and linear layers to zero, by magnitude.

    The weights themselves do not change: each operator gets its weight times a mask. The mask of a
    parameter is made when a part of it is first read, and then kept. Gradients of the weights are
    masked in the same way. Of equal magnitudes the first ones are pruned, so that the number of
    pruned elements is exact.

    If the scope is `layer` or `global`, the first execution of the model is not pruned: it shows
    which weights there are. Masks are made at the end of its step, or when it is called again.

    With a schedule, the fraction rises from `initial` to `sparsity` in `steps` steps of the
    optimizer by ``s_f + (s_i - s_f) (1 - t/steps)^3`` (Zhu and Gupta, 2017). What was pruned stays
    pruned.

    Args:
        sparsity: The fraction that is set to zero, from 0 to 1.
        gradients: Whether to mask the gradients of the weights as well.
        embeddings: Whether to prune embedding tables where rows are picked from them.
        scope: What it is a fraction of: each `matrix`, each `weight` as a whole, the weights of
            each `layer` together, or all weights of the model (`global`).
        steps: In how many steps the fraction rises; 0 for no schedule.
        begin: The step at which it begins to rise.
        initial: The fraction before.
        every: After how many steps the masks are made again.
        score: What is compared: the `magnitude` of an element, or `taylor`, the square of its
            product with its gradient. The first execution is then not pruned, either.
        from_: File of a result of `sensitivity`, whose ranking `keep` uses; the option ``from`` on
            the command line.
        keep: How many of the most sensitive operators keep their weights.

    Attributes:
        masks: The mask of each parameter.

    Raises:
        ValueError: An option is not in its range.

    >>> tool = Prune(sparsity=0.5)
    """

    saved = ("sparsity", "scope", "steps", "begin", "initial", "every", "score")

    def __init__(
        self,
        sparsity: float,
        gradients: bool = True,
        embeddings: bool = False,
        scope: Scope = "matrix",
        steps: int = 0,
        begin: int = 0,
        initial: float = 0.0,
        every: int = 1,
        score: Score = "magnitude",
        from_: str | None = None,
        keep: int | None = None,
    ) -> None:
        for name, value in (("sparsity", sparsity), ("initial", initial)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, but is {value}")
        check_choice("scope", scope, Scope)
        if steps < 0 or begin < 0 or every < 1:
            raise ValueError("steps and begin must not be negative, and every must be positive")
        self.scope, self.steps, self.begin = scope, steps, begin
        self.initial, self.every = initial, every
        together = scope in ("layer", "global")
        super().__init__(sparsity, together, bool(steps), score, gradients, embeddings)
        self.across_layers = scope == "global"
        self.kept, _ = chosen(from_, keep)
        self.depends_on(
            MappingTool(
                [
                    ["*", _by_values],
                    ["tensorflow", _by(numpy_mask)],
                    ["pytorch", _by(torch_mask)],
                ]
            )
        )

    def fraction(self, step: int) -> float:
        """Return the fraction that is pruned after a number of steps of the optimizer."""
        if not self.steps:
            return self.sparsity
        passed = min(max(step - self.begin, 0), self.steps)
        if passed < self.steps:
            passed -= passed % self.every
        return self.sparsity + (self.initial - self.sparsity) * (1 - passed / self.steps) ** 3

    def mask(self, context: OpContext, tensor: Any, order: Order, key: str) -> tuple[Any, int]:
        """Return the mask of a tensor, and how many elements it sets to zero."""
        if self.waits:
            return super().mask(context, tensor, order, key)
        shape = [int(n) for n in facts_of(context).shape(tensor) or () if n is not None]
        batch, count = self._count(shape, order)
        matrices = math.prod(shape[axis] for axis in order.axes[:batch])
        earlier = self.earlier.get(key)
        if earlier is not None:  # What was pruned stays pruned.
            tensor = tensor * facts_of(context).cast(earlier, tensor)
        return context[_MASK](tensor, order.axes, count, batch), count * matrices

    def _count(self, shape: Sequence[int], order: Order) -> tuple[int, int]:
        """Return how many axes count separate matrices, and how many elements each loses."""
        batch = order.batch if self.scope == "matrix" else 0
        matrices = math.prod(shape[axis] for axis in order.axes[:batch])
        return batch, round(self.present * (math.prod(shape) // max(matrices, 1)))

    def decide(self, scores: Mapping[str, Any], orders: Mapping[str, Order]) -> dict[str, Any]:
        """Return what is left of each weight without the smallest of its matrix, of itself, of its
        layer or of all.
        """
        import numpy as np

        found = {}
        if self.scope in ("matrix", "weight"):
            for key, values in scores.items():
                axes = list(range(values.ndim))
                batch, count = self._count(values.shape, orders[key]._replace(axes=axes))
                found[key] = numpy_mask(values, axes, count, batch) != 0
            return found
        groups: dict[str, list[str]] = {}
        for key in scores:
            groups.setdefault(_layer_of(key) if self.scope == "layer" else "", []).append(key)
        for keys in groups.values():
            every = np.concatenate([scores[key].ravel() for key in keys])
            kept = np.ones(every.size, bool)
            kept[np.argsort(every, kind="stable")[: round(self.present * every.size)]] = False
            ends = np.cumsum([scores[key].size for key in keys])[:-1]
            for key, part in zip(keys, np.split(kept, ends), strict=True):
                found[key] = part.reshape(scores[key].shape)
        return found


def _layer_of(key: str) -> str:
    """Return a name of the layer that a weight belongs to; one outside of layers is its own."""
    cut = max(key.rfind("."), key.rfind("/"))  # PyTorch's names have dots, Keras' slashes.
    root = key.partition(":")[0]
    return key[:cut] if cut > 0 else key if "#" in key or not root else root


def _by(mask: Callable[..., Any]) -> Callable[[OpContext], None]:
    def rule(context: OpContext) -> None:
        context[_MASK] = mask

    return rule


def _by_values(context: OpContext) -> None:
    def mask(weight: Any, axes: list[int], count: int, batch: int = 0) -> Any:
        new = numpy_mask(array_of(context, weight), axes, count, batch)
        return facts_of(context).cast(new, weight)

    context[_MASK] = mask
