"""Damage by brute force: each operator is changed by itself, and the program runs again.

Owns the measurement with which the estimates of `Sensitivity` can be compared. It runs on every
driver, and needs no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.engine.activation import apply
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.results import Table
from amanda_tools.kit.tensors.scores import scores_of
from amanda_tools.kit.tensors.values import facts_of, need_numpy
from amanda_tools.quantize.operands import Operand
from amanda_tools.sensitivity.change import Axes, Change
from amanda_tools.sensitivity.divergence import divergence
from amanda_tools.sensitivity.result import SensitivityResult

__all__ = ["MeasuredOp", "MeasuredResult", "measure_damage"]


@dataclass(frozen=True)
class MeasuredOp:
    """What the program's outputs lose if one operator is changed.

    Attributes:
        name: Readable name of the operator.
        id: Its op id.
        divergence: The Kullback-Leibler divergence of the softmax of the outputs from what it is
            without the change, in nats; the mean over the samples. None if it was not measured.
        error: Half the squared error of the outputs, summed over the classes; likewise.
        unmeasured: Why it was not measured; else empty.
    """

    name: str
    id: int
    divergence: float | None
    error: float | None
    unmeasured: str = ""


@dataclass
class MeasuredResult:
    """The operators, the most damaging first. Those that were not measured are the last.

    Attributes:
        change: What is done to each operator.
        ops: The operators.
    """

    change: str
    ops: list[MeasuredOp] = field(default_factory=list)

    def table(self) -> Table:
        """Return a table with a row for each operator."""
        rows = [
            (op.name, *("not measured" if op.unmeasured else n for n in (op.divergence, op.error)))
            for op in self.ops
        ]
        title = f"{len(self.ops)} operators by the measured damage of {self.change}"
        why = [f"{op.name}: {op.unmeasured}" for op in self.ops if op.unmeasured]
        return Table("; ".join([title, *why]), ("op", "KL", "half squared error"), rows)

    def agreement(
        self, estimate: SensitivityResult, figure: str = "damage", by: str = "divergence"
    ) -> float:
        """Return Spearman's rank correlation of an estimate with what was measured.

        Args:
            estimate: The result of `Sensitivity`.
            figure: The attribute of its operators: ``damage``, ``sqnr``, ``output_sqnr`` or
                ``output_divergence``. Ratios of signal to noise count as the higher the better.
            by: The attribute of the measured ones: ``divergence`` or ``error``.

        Raises:
            ValueError: Less than two operators have both figures.
        """
        sign = -1.0 if figure.endswith("sqnr") else 1.0
        known = {op.id: getattr(op, figure) for op in estimate.ops}
        pairs = [
            (sign * known[op.id], getattr(op, by))
            for op in self.ops
            if known.get(op.id) is not None and not op.unmeasured
        ]
        if len(pairs) < 2:
            raise ValueError(f"{len(pairs)} operators have the figure {figure} and were measured")
        return _rank_correlation(*zip(*pairs, strict=True))


#: Why an operator is not measured whose operands did not pass by.
_AGAIN = "it was not executed again"


class _Changed(Tool):
    """Changes the operands of one operator; of none while `chosen` is None."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.chosen: int | None = None
        #: Why the chosen operator was not changed; empty if it was.
        self.failed = ""
        #: Op id -> readable name.
        self.names: dict[int, str] = {}
        self.facts: list[Facts] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Insert the change, if the op is the chosen one."""
        facts, number = facts_of(context), context.get_op_id()
        found = self.change.operands(context, facts)
        if not found:
            return
        self.names.setdefault(number, context.name)
        self.facts = [facts]
        for operand, axes in found if number == self.chosen else []:
            context.insert_before_op(
                partial(self._changed, facts=facts, operand=operand, axes=axes),
                inputs=[operand.position],
            )

    def choose(self, number: int | None) -> None:
        """Change this operator from now on."""
        self.chosen, self.failed = number, _AGAIN
        self.invalidate()

    def _changed(
        self,
        value: Any,
        facts: Facts,
        operand: Operand,
        axes: Axes,
    ) -> Any:
        try:
            changed = self.change.applied(facts, value, operand, axes)
        except NotReadableError as error:
            self.failed = str(error)
            return None
        if self.failed == _AGAIN:
            self.failed = ""
        return changed


def measure_damage(
    program: Callable[[], Any],
    weights: str = "int8",
    activations: str = "int8",
    sparsity: float | None = None,
) -> MeasuredResult:
    """Run a program once as it is, and once for each operator that would be quantized or pruned.

    Args:
        program: Returns the scores of a classifier, of shape ``(samples, classes)``: a tensor, or
            something that NumPy converts to an array. It must compute the same each time.
        weights: As of `Sensitivity`.
        activations: Likewise.
        sparsity: Likewise.

    Raises:
        ValueError: As of `Sensitivity`.
        ToolError: The program does not return scores of the same shape each time.
        ImportError: NumPy is not installed.
    """
    need_numpy()
    tool = _Changed(Change(weights, activations, sparsity))
    found = []
    with apply(tool):
        outputs = program()
        expected = scores_of(outputs, tool.facts, "measure_damage")
        for number, name in list(tool.names.items()):
            tool.choose(number)
            changed = scores_of(program(), tool.facts, "measure_damage", expected)
            error = float(((changed - expected) ** 2).sum(-1).mean()) / 2
            measured = MeasuredOp(name, number, divergence(expected, changed), error)
            if tool.failed:
                measured = MeasuredOp(name, number, None, None, tool.failed)
            found.append(measured)
    found.sort(key=lambda op: (bool(op.unmeasured), -(op.divergence or 0.0)))
    return MeasuredResult(str(tool.change), found)


def _rank_correlation(first: Any, second: Any) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    import numpy

    ranks: list[Any] = []
    for values in (first, second):
        _, places, counts = numpy.unique(values, return_inverse=True, return_counts=True)
        ends = numpy.cumsum(counts)
        ranks.append((ends - (counts - 1) / 2)[places])
    return float(numpy.corrcoef(*ranks)[0, 1])
