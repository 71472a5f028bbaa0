"""`MacCount`: multiply-accumulates of the operators that read pruned weights.

Owns that each operator is counted once, and how several weights share its products.
"""

from __future__ import annotations

from collections.abc import Mapping

from amanda_core import OpContext
from amanda_tools.flops.formulas import Formula, formula_of
from amanda_tools.kit.tensors.types import size_of
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.prune.reads import PRODUCTS
from amanda_tools.prune.result import PrunedWeight

__all__ = ["MacCount"]

#: Key of a context: the formula of its cost, the sizes of its inputs, and which weights share it.
_MACS = "prune.macs"


class MacCount:
    """Counts the multiply-accumulates of one execution of each operator."""

    def __init__(self) -> None:
        #: Ids of ops that were counted.
        self._ops: set[int] = set()

    def expect(self, context: OpContext, shares: Mapping[str, float]) -> None:
        """Note that an op's products are shared by weights: key -> share."""
        formula = formula_of(context["type"], context) if context["type"] in PRODUCTS else None
        if isinstance(formula, Formula):
            inputs, facts = context.get_inputs() or (), facts_of(context)
            try:
                sizes = tuple(size_of(facts, inputs[place]) for place in formula.inputs)
            except (IndexError, ValueError):
                return
            context[_MACS] = formula, sizes, shares

    def count(self, context: OpContext, rows: Mapping[str, PrunedWeight]) -> None:
        """Add the multiply-accumulates of an op to its weights, the first time."""
        if _MACS not in context or context.get_op_id() in self._ops:
            return
        formula, sizes, shares = context[_MACS]
        facts, outputs = facts_of(context), context.get_outputs() or ()
        try:
            macs = formula.count(sizes, tuple(size_of(facts, value) for value in outputs))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return  # A shape is not known before the graph runs.
        self._ops.add(context.get_op_id())
        for key, share in shares.items():
            rows[key].macs += round(macs * share)
