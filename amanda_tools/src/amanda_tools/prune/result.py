"""The result of `prune`: the pruned weights, and what was not reached.

Owns how it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from amanda_core import OpContext
from amanda_core.results import Table
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    fields_of,
    format_count,
    format_percent,
    render_json,
)
from amanda_tools.kit.weights.coverage import UnreachedWeight, describe_coverage, list_weights

__all__ = ["PruneResult", "PrunedWeight"]

#: Parts and figures that are about weights, which processes may have together.
_OF_THE_MODEL = ("weights", "elements", "pruned", "read", "unreached", "parameters", "reached")


@dataclass
class PrunedWeight:
    """A pruned weight.

    Attributes:
        op: Readable name of the first operator that uses it.
        source: ``file:line`` of the operator's call, or None.
        shape: Its shape.
        elements: How many elements it has.
        pruned: How many of them are set to zero.
        name: Its name in the model; empty for one that is known by its operator only.
        read: How many of its elements operators have read with the mask applied. Of several
            experts in one weight, these are the ones that an input was sent to.
        macs: Multiply-accumulates of one execution of each operator that reads it; 0 if unknown.
    """

    op: str
    source: str | None
    shape: list[int]
    elements: int
    pruned: int
    name: str = ""
    read: int = 0
    macs: int = 0

    @classmethod
    def of(cls, context: OpContext, shape: Sequence[int], name: str = "") -> PrunedWeight:
        """Return an entry for a weight that an operator reads, of which nothing is pruned yet."""
        return cls(context.name, context.source, list(shape), math.prod(shape), 0, name)

    @property
    def effective_macs(self) -> int:
        """How many multiply-accumulates remain of one execution."""
        return round(self.macs * (1 - self.pruned / max(self.elements, 1)))


@dataclass
class PruneResult(Tabular):
    """Which weights are pruned.

    Attributes:
        sparsity: The requested fraction.
        weights: The weights.
        skipped: Names of operators whose weight is not known before they run, because they
            multiply two activations or because the weight is computed.
        parameters: How many elements the matrices among the parameters of the models have.
        reached: How many of these are read with the mask applied.
        unreached: The others: which parameters, how many elements, and why.
        read_otherwise: Parameters that are read with the mask applied, and by other operators
            without it: how many elements the former read, and why the latter are not masked.
        tool_seconds: Time that making the masks took, without the multiplications in each
            execution: in a graph these are operators of the program.
        notes: What cannot be pruned, and why.
        tool: Name of the tool.
    """

    records = "weights", PrunedWeight

    sparsity: float
    weights: list[PrunedWeight] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    parameters: int = 0
    reached: int = 0
    unreached: list[UnreachedWeight] = field(default_factory=list)
    read_otherwise: list[UnreachedWeight] = field(default_factory=list)
    tool_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    tool: str = "prune"

    @property
    def achieved(self) -> float:
        """The fraction of the elements of `weights` that is set to zero."""
        return self._sum("pruned") / max(self._sum("elements"), 1)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one execution of the operators that read `weights`."""
        return self._sum("macs")

    @property
    def effective_macs(self) -> int:
        """How many of these remain if products with zeros are left out."""
        return self._sum("effective_macs")

    def _sum(self, attribute: str) -> int:
        return sum(getattr(weight, attribute) for weight in self.weights)

    def table(self) -> Table:
        """Return a table with a row for each weight and one for their sum."""
        rows = [(w.op, str(tuple(w.shape)), w.elements, w.pruned) for w in self.weights]
        elements, pruned = self._sum("elements"), self._sum("pruned")
        parts = [f"{format_percent(pruned, elements) or 'nothing'} of the weights pruned"]
        if self.skipped:
            parts.append(
                f"{format_count(len(self.skipped), 'product')} without a known weight NOT pruned"
            )
        parts.append(f"making masks took {self.tool_seconds:.3g} s")
        if self.macs:
            left = format_percent(self.effective_macs, self.macs)
            parts.append(f"{left} of {format_count(self.macs, 'MAC')} left")
        parts += describe_coverage(self.parameters, self.reached, self.unreached)
        parts += list_weights("also read without the mask", self.read_otherwise)
        parts += self.notes
        columns = ("op", "weight", "elements", "pruned")
        return Table("; ".join(parts), columns, [*rows, ("all", "", elements, pruned)])

    def to_json(self) -> str:
        """Return the result as JSON."""
        elements, pruned = self._sum("elements"), self._sum("pruned")
        drawn = [
            charts.figures(
                charts.figure(
                    "of the weights pruned", pruned / elements if elements else None, "%"
                ),
                charts.figure("weights", len(self.weights)),
                charts.figure("elements pruned", pruned),
                charts.figure("elements not reached", self.parameters - self.reached or None),
            ),
            charts.bars(
                "Pruned",
                [("operator", "weights", "op")],
                charts.measure("pruned", "pruned"),
                charts.measure("all", "elements"),
            ),
        ]
        macs = {"macs": self.macs, "effective_macs": self.effective_macs}
        content = {
            "format": f"amanda.{self.tool}/1",
            "merge": dict.fromkeys(_OF_THE_MODEL, "shared"),
            **fields_of(self),
            "achieved": self.achieved,
            **macs,
            "charts": drawn,
        }
        return render_json(content)
