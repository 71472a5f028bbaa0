"""`WeightKeys`: the names of weights in the results of tools.

Owns which weight a result names for an input: the parameter and the part of it that is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from amanda_core import OpContext
from amanda_core.errors import StaleContextError
from amanda_core.weights.reads import Weight

__all__ = ["WeightKeys"]


class WeightKeys:
    """The keys of the weights that an operator reads, by input position.

    A key holds the model, the parameter's name in it, and the part that is read:
    ``Mixture:experts.w[3]``. A view is not a read: the operator that computes with it is.

    Args:
        context: The operator's context, during its analysis.
        views: Include weights of which the operator only makes a view.

    Attributes:
        consumed: Whether the operator computes with its weights or copies them.

    An analysis routine names the weights of its operator::

        keys = WeightKeys(context)
        if keys.consumed:
            context.insert_before_op(self.look, observe=True, names=list(keys))
    """

    def __init__(self, context: OpContext, views: bool = False) -> None:
        reads = context.weights
        self.consumed = reads.consumed
        there = views or reads.consumed
        self._keys = {place: _key(weight) for place, weight in reads.items() if there}
        varies = there and any(weight.varies for weight in reads.values())
        self._varies = varies
        self.follow(context)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys.values())

    def follow(self, context: OpContext) -> None:
        """Use the executions of this context from now on.

        Call it in each analysis: a driver may make the context of an operator again.
        """
        self._context = weakref.ref(context) if self._varies else None

    def at(self, position: int, item: int | None = None) -> str | None:
        """Return the key of the weight at an input, or at an item of a list; None if it is none.

        Call it in a routine: another execution may read another weight. In a backward routine,
        such a weight is not known any more, and this returns None.
        """
        place: int | tuple[int, int] = position if item is None else (position, item)
        context = self._context() if self._context is not None else None
        if context is None:
            return self._keys.get(place)
        try:
            weight = context.weights.get(place)
        except StaleContextError:
            return None
        return None if weight is None else _key(weight)


def _key(weight: Weight) -> str:
    return weight.key.removeprefix(":")  # A parameter outside of modules has no model.
