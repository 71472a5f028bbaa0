"""Names of what lives in buffers: parameters, and the state that optimizers keep of them.

Owns which buffer has which name. A parameter is known once an operator reads it as a weight, the
state of an optimizer once a step has ended. No tensor is kept alive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from amanda_core import OpContext
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_tools.kit.tensors.values import facts_of

__all__ = ["BufferNames"]


class BufferNames:
    """The names of buffers, told to who allocated them.

    Args:
        tell: Called with the key of a buffer and its name.
        meet: Called with facts and a state of an optimizer, which no operator may have allocated.
    """

    def __init__(
        self, tell: Callable[[Hashable, str], None], meet: Callable[[Facts, Any], None]
    ) -> None:
        self._tell, self._meet = tell, meet
        #: Key of the buffer of a parameter -> its name.
        self._parameters: dict[Hashable, str] = {}
        #: Facts of the drivers that showed operators of optimizers.
        self._with_optimizers: list[Facts] = []

    def read(self, context: OpContext) -> None:
        """Note the parameters that an operator reads, or that there are optimizers."""
        facts = facts_of(context)
        if context.zone == "optimizer":
            if facts not in self._with_optimizers:
                self._with_optimizers.append(facts)
            return
        if context.zone == "init":
            return  # Parameters have no names before the model has them.
        inputs = context.get_inputs() or ()
        for place, weight in context.weights.items():
            position, item = place if isinstance(place, tuple) else (place, None)
            value = inputs[position] if item is None else inputs[position][item]
            key = _key(facts, value)
            if key is not None:
                self._parameters[key] = weight.name
                self._tell(key, weight.name)

    def end_step(self) -> None:
        """Name the states that optimizers keep of parameters."""
        for facts in self._with_optimizers:
            for parameter, what, value in facts.optimizer_states():
                key = _key(facts, value)
                if key is None:
                    continue
                owner = self._parameters.get(_key(facts, parameter))
                if owner is not None:  # Other optimizers live on in the process.
                    self._meet(facts, value)
                self._tell(key, f"{what} of {owner or 'a parameter'}")


def _key(facts: Facts, value: Any) -> Hashable:
    """Return the key of the buffer of a tensor; None if it is none or its buffer is not visible."""
    try:
        storage = facts.storage(value) if facts.is_tensor(value) else None
    except NotReadableError:
        return None
    return None if storage is None else storage.key
