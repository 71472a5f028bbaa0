"""`Copies`: copies of weights, such as gathered rows or casts, from their operators to later ones.

Owns which types of operators copy, and the table from a copy to the weights that it was made from.
Views need no table: the core finds them by where they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.interface.facts import Facts
from amanda_core.runtime.weak import Known
from amanda_core.weights.reads import Weight
from amanda_tools.kit.operators.tool import is_eager

__all__ = ["COPYING", "Copies"]

#: Common types of operators whose outputs hold the values of their inputs in another arrangement or
#: precision.
COPYING = frozenset(
    {"slice", "gather", "cast", "identity", "concat", "stack", "reshape", "transpose", "split"}
    | {"expand", "repeat", "tile", "squeeze", "unsqueeze", "dequantize"}
)


class Copies(Tool):
    """Follows copies of weights to the operators that compute with them.

    An operator that gathers, casts or concatenates weights is a reader of them itself. The operator
    that computes with the result reads a tensor that lies elsewhere, so its ``context.weights`` is
    empty. This tool notes which weights a copy was made from. Only operators that copy a weight, or
    a copy, get a routine.

    A tool that needs this depends on it: ``self.depends_on(self.copies)``.

    >>> copies = Copies()
    """

    outermost = True
    changes_values = False

    def __init__(self) -> None:
        super().__init__()
        self._sources: Known[tuple[Weight, ...]] = Known()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)

    def analyse(self, context: OpContext) -> None:
        """Insert a routine that notes the outputs, if the op copies weights."""
        if context.get("type") not in COPYING or not is_eager(context.namespace):
            return
        if sources := self._all(context):
            varies = any(weight.varies for weight in sources)
            context.insert_after_op(
                self._note, observe=True, context=context, sources=None if varies else sources
            )

    def analyse_outputs(self, context: OpContext) -> None:
        """Note the outputs of an op in a graph, all of whose operators are analysed in order."""
        if context.get("type") in COPYING and not is_eager(context.namespace):
            self._note(*context.get_outputs() or (), context=context, sources=None)

    def reads(self, context: OpContext) -> dict[int | tuple[int, int], tuple[Weight, ...]]:
        """Return the weights from which the inputs of the present execution were copied.

        Args:
            context: The op's context, during a call of a routine.

        Returns:
            The weights by place, as in ``context.weights``. An input that is not a copy of a weight
            has no entry.
        """
        facts = context.facts
        found: dict[int | tuple[int, int], tuple[Weight, ...]] = {}
        if facts is None:
            return {}
        for position, value in enumerate(context.get_inputs() or ()):
            if isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    found[position, index] = self.of(facts, item)
            else:
                found[position] = self.of(facts, value)
        return {place: weights for place, weights in found.items() if weights}

    def of(self, facts: Facts, value: Any) -> tuple[Weight, ...]:
        """Return the weights from which a tensor, or the base of a view, was copied.

        Args:
            facts: The driver's facts, ``context.facts``.
            value: A value of the program.
        """
        if not facts.is_tensor(value):
            return ()
        return self._sources.get(value) or self._sources.get(facts.base(value)) or ()

    def _all(self, context: OpContext) -> tuple[Weight, ...]:
        # What only makes a view of a weight copies nothing.
        own = context.weights
        found = dict.fromkeys(own.values() if own.consumed else ())
        for weights in self.reads(context).values():
            found.update(dict.fromkeys(weights))
        return tuple({weight.key: weight for weight in found}.values())

    def _note(self, *outputs: Any, context: OpContext, sources: tuple[Weight, ...] | None) -> None:
        facts = context.facts
        if sources is None:
            sources = self._all(context)
        if facts is not None and sources:
            for output in _flat(outputs):
                if facts.is_tensor(output):
                    self._sources.set(output, sources)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
