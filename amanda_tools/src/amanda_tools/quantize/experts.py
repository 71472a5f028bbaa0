"""Experts whose matrices are multiplied by one operator: which of them get rows.

Owns the count. Experts that are operators of their own are known by what is read of the parameter.
"""

from __future__ import annotations

from typing import Any

from amanda_core import OpContext
from amanda_core.interface.facts import Facts
from amanda_core.weights.reads import Weight
from amanda_tools.kit.tensors.values import host
from amanda_tools.quantize.activations import Activation

__all__ = ["Experts"]


class Experts:
    """Notes which experts had rows: of a grouped product during the calibration, of gathered
    matrices during the run.
    """

    def __init__(self) -> None:
        #: Owner -> name of the weight, and whether each group had a row.
        self._seen: dict[str, tuple[str, Any]] = {}

    def insert(self, context: OpContext, facts: Facts, weight: Weight, rows: Activation) -> None:
        """Insert the count, if the operator has an input with the ends of its groups."""
        names = context.input_names
        if "offs" not in names or len(weight.shape) != 3:
            return
        context.insert_before_op(
            self._note,
            inputs=[names.index("offs")],
            observe=True,
            facts=facts,
            owner=weight.owner,
            name=context.name if weight.name.startswith("#") else weight.name,
            rows=rows,
        )

    def insert_gather(self, context: OpContext, facts: Facts, weight: Weight) -> None:
        """Insert the count, if the operator gathers whole matrices by one list of numbers."""
        lists, others = [], []
        for position, value in enumerate(context.get_inputs() or ()):
            if facts.is_tensor(value):
                lists += [position] if "int" in facts.dtype(value) else []
            else:
                others.append(value)
        # Along the first axis: `weight[numbers]`, or with an axis of 0.
        if len(weight.shape) == 3 and len(lists) == 1 and all(one in (None, 0) for one in others):
            context.insert_before_op(
                self._note_gathered,
                inputs=lists,
                observe=True,
                facts=facts,
                owner=weight.owner,
                name=weight.name,
                count=weight.shape[0],
            )

    def without_rows(self) -> list[str]:
        """Return the names of the matrices that no row has met."""
        return [
            f"{name}[{index}]"
            for name, seen in self._seen.values()
            for index, one in enumerate(seen)
            if not one
        ]

    def _note(self, ends: Any, facts: Facts, owner: str, name: str, rows: Activation) -> None:
        import numpy

        if rows.grid is not None or not facts.is_tensor(ends):
            return
        self._add(owner, name, numpy.diff(host(facts, ends).array, prepend=0) > 0)

    def _note_gathered(self, chosen: Any, facts: Facts, owner: str, name: str, count: int) -> None:
        import numpy

        if facts.is_tensor(chosen):
            self._add(owner, name, numpy.isin(numpy.arange(count), host(facts, chosen).array))

    def _add(self, owner: str, name: str, had: Any) -> None:
        known = self._seen.get(owner)
        self._seen[owner] = name, had if known is None else known[1] | had
