"""`Prune`: pruning by magnitude, by matrix, weight, layer or over the whole model, with a schedule.

Owns the number of elements that each weight loses. Mapping rules say how a framework's tensor
becomes a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from amanda_core import OpContext
from amanda_tools.mapping import MappingTool
from amanda_tools.prune.masks import numpy_mask, torch_mask
from amanda_tools.prune.pruning import Order, Pruning, array_of
from amanda_tools.tensors.values import facts_of

__all__ = ["Prune", "Scope"]

#: What the fraction is of: each matrix by itself, each parameter, each module's, or all of them.
Scope = Literal["matrix", "weight", "layer", "global"]
#: Key of a context: makes a mask, ``(weight, axes, count, batch) -> mask``.
_MASK = "prune.mask"


class Prune(Pruning):
    """Sets the smallest weights of convolutions and linear layers to zero, by magnitude.

    The weights themselves do not change: each operator gets its weight times a mask. The mask of a
    parameter is made when a part of it is first read, and then kept. Gradients of the weights are
    masked in the same way. Of equal magnitudes the first ones are pruned, so that the number of
    pruned elements is exact.

    If the scope is `layer` or `global`, the first execution of the model is not pruned: it shows
    which weights there are. Masks are made at its end.

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

    Attributes:
        masks: The mask of each parameter.

    Raises:
        ValueError: An option is not in its range.

    >>> tool = Prune(sparsity=0.5)
    """

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
    ) -> None:
        for name, value in (("sparsity", sparsity), ("initial", initial)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, but is {value}")
        if scope not in get_args(Scope):
            raise ValueError(f"scope must be of {', '.join(get_args(Scope))}, not {scope!r}")
        if steps < 0 or begin < 0 or every < 1:
            raise ValueError("steps and begin must not be negative, and every must be positive")
        super().__init__(sparsity, gradients, embeddings)
        self.scope, self.steps, self.begin = scope, steps, begin
        self.initial, self.every = initial, every
        self._step = 0
        self._present = self.fraction(0)
        #: Weight -> its magnitudes, and how many of them are pruned, over several weights.
        self._magnitudes: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._unsettled = False
        self.depends_on(
            MappingTool(
                [
                    ["*", _by_values],
                    ["tensorflow", _by(numpy_mask)],
                    ["pytorch", _by(torch_mask)],
                ]
            )
        )
        if scope in ("layer", "global"):
            self.add_inst_for_call(end=lambda call: self._settle())
        if steps or scope in ("layer", "global"):
            self.add_inst_for_step(end=self._end_step)

    def fraction(self, step: int) -> float:
        """Return the fraction that is pruned after a number of steps of the optimizer."""
        if not self.steps:
            return self.sparsity
        rest = 1 - min(max(step - self.begin, 0), self.steps) / self.steps
        return self.sparsity + (self.initial - self.sparsity) * rest**3

    def mask(self, context: OpContext, tensor: Any, order: Order, key: str) -> tuple[Any, int]:
        """Return the mask of a tensor, and how many elements it sets to zero."""
        earlier = self.earlier.get(key)
        pruned = tensor if earlier is None else tensor * earlier
        shape = [int(n) for n in facts_of(context).shape(tensor) or () if n is not None]
        batch = order.batch if self.scope == "matrix" else 0
        groups = 1
        for axis in order.axes[:batch]:
            groups *= shape[axis]
        elements = 1
        for length in shape:
            elements *= length
        if self.scope in ("matrix", "weight"):
            count = round(self._present * (elements // max(groups, 1)))
        elif key in self._counts:
            count = self._counts[key]
        else:
            self._magnitudes[key] = abs(array_of(context, pruned).transpose(order.axes)).ravel()
            self._unsettled = True
            if earlier is not None:
                return earlier, elements - int((array_of(context, earlier) != 0).sum())
            count = 0
        return context[_MASK](pruned, order.axes, count, batch), count * groups

    def options(self) -> dict[str, Any]:
        """Return what decides which elements are pruned."""
        names = ("sparsity", "scope", "steps", "begin", "initial", "every")
        return {name: getattr(self, name) for name in names}

    def progress(self) -> dict[str, Any]:
        """Return the number of steps, and how many elements each weight loses."""
        return {"step": self._step, "present": self._present, "counts": self._counts}

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue from the result of `progress`."""
        self._step, self._present = progress["step"], progress["present"]
        self._counts = dict(progress["counts"])

    def _end_step(self, number: int) -> None:
        self._settle()
        self._step += 1
        passed = self._step - self.begin
        fraction = self.fraction(self._step)
        if fraction != self._present and (passed % self.every == 0 or passed >= self.steps):
            self._present = fraction
            self._counts.clear()
            self.renew()

    def _settle(self) -> None:
        """Distribute what is pruned over the weights of each group, if new ones were found."""
        if not self._unsettled:
            return
        import numpy as np

        self._unsettled = False
        groups: dict[str, list[str]] = {}
        for key in self._magnitudes:
            layer = key.rpartition(".")[0] if self.scope == "layer" else ""
            groups.setdefault(layer, []).append(key)
        for keys in groups.values():
            every = np.concatenate([self._magnitudes[key] for key in keys])
            smallest = np.argsort(every, kind="stable")[: round(self._present * every.size)]
            ends = np.cumsum([self._magnitudes[key].size for key in keys])
            places = np.bincount(np.searchsorted(ends, smallest, side="right"), minlength=len(keys))
            self._counts.update(zip(keys, map(int, places), strict=True))
        self.renew()


def _by(mask: Callable[..., Any]) -> Callable[[OpContext], None]:
    def rule(context: OpContext) -> None:
        context[_MASK] = mask

    return rule


def _by_values(context: OpContext) -> None:
    def mask(weight: Any, axes: list[int], count: int, batch: int = 0) -> Any:
        new = numpy_mask(array_of(context, weight), axes, count, batch)
        return facts_of(context).cast(new, weight)

    context[_MASK] = mask
