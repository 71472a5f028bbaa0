"""The sparsity profiler's result: zeros by tensor and operator, dead channels, effective MACs.

Owns the percentages and how they are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from amanda_core.results import OpFigures, Table
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_count,
    format_percent,
    format_quantity,
    render_html,
    render_json,
)

__all__ = ["MeasuredTensor", "Product", "SparsityResult"]

By = Literal["tensor", "weight", "dead", "product"]


@dataclass
class MeasuredTensor(OpFacts):
    """The zeros in one tensor of one operator. Counts are sums over all executions.

    Attributes:
        kind: ``input``, ``weight``, ``output`` or ``gradient``.
        tensor: Its role or name among the operator's inputs, or its position.
        shape: Its shape in the last execution.
        executions: How often it was measured.
        elements: How many elements it had.
        zeros: How many elements were exactly zero.
        small: How many elements had a magnitude below the limit, zeros included.
        channels: How many channels it has; 0 if it has none.
        zero_channels: How many channels held only zeros, counted in each execution.
        dead: Indices of the channels that held only zeros in all executions.
        blocks: How many blocks the matrix has.
        zero_blocks: How many blocks held only zeros.
        groups: How many groups of four there are along the (input) channels.
        compliant: How many groups have at most two elements that are not zero.
        weight: The parameter, or the part of it, that it is, such as ``Net:experts.w[3]``; None if
            it is none.
    """

    kind: str
    tensor: str
    shape: list[int]
    executions: int = 0
    elements: int = 0
    zeros: int = 0
    small: int = 0
    channels: int = 0
    zero_channels: int = 0
    dead: list[int] = field(default_factory=list)
    blocks: int = 0
    zero_blocks: int = 0
    groups: int = 0
    compliant: int = 0
    weight: str | None = None

    @property
    def sparsity(self) -> float:
        """The fraction of elements that are exactly zero."""
        return self.zeros / self.elements if self.elements else 0.0

    @property
    def is_2_4(self) -> bool:
        """True if each group of four has at least two zeros."""
        return bool(self.groups) and self.compliant == self.groups


@dataclass
class Product(OpFacts):
    """The multiplications of one operator, with and without zeros. Counts are sums.

    Attributes:
        executions: How often it was measured.
        macs: Multiply-accumulates, zeros included.
        by_weight: Those whose weight (or right operand) is not zero.
        by_input: Those whose input (or left operand) is not zero.
        by_both: Those whose operands are both not zero.
        exact: Whether `by_input` and `by_both` are exact. If not, they are estimates that count
            each element of an input channel as used equally often. With padding or strides, some
            elements are used more often than others.
    """

    executions: int = 0
    macs: int = 0
    by_weight: int = 0
    by_input: int = 0
    by_both: int = 0
    exact: bool = True


@dataclass
class SparsityResult(Tabular):
    """The zeros of all tensors and what they would save.

    Attributes:
        limit: Magnitudes below it count as small.
        block: Side of the blocks.
        tensors: The tensors in the order of their first execution.
        products: The operators that multiply.
        notes: What is not measured, and why.
        tool_seconds: The part of `wall_seconds` that measuring took, without the driver's overhead.
        wall_seconds: Time from the first to the last operator that was measured.
    """

    records = "tensors", MeasuredTensor

    limit: float
    block: int
    tensors: list[MeasuredTensor] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def dead(self) -> list[MeasuredTensor]:
        """Outputs with channels that were zero in all executions."""
        return [tensor for tensor in self.tensors if tensor.kind == "output" and tensor.dead]

    def of(self, kind: str) -> list[MeasuredTensor]:
        """Return the tensors of one kind."""
        return [tensor for tensor in self.tensors if tensor.kind == kind]

    def op_figures(self) -> Iterator[OpFigures]:
        """Yield zeros and effective MACs of operators, for the results of other tools."""
        zeros: dict[tuple[str, int, str], int] = {}
        for tensor in self.tensors:
            if tensor.kind in ("output", "weight"):
                key = (tensor.namespace, tensor.id, tensor.kind)
                zeros[key] = zeros.get(key, 0) + tensor.zeros
                yield tensor.figures({f"zeros of the {tensor.kind}": zeros[key]})
        for product in self.products:
            yield product.figures({"effective macs": product.by_both})

    def table(self, by: By = "tensor") -> Table:
        """Return a table with percentages.

        Args:
            by: One row for each ``tensor``, ``weight``, ``dead`` output or ``product``.

        Raises:
            ValueError: `by` is something else.
        """
        if by == "product":
            heads = ("op", "type", "MACs", "by weight", "by input", "by both", "effective")
            rows = [
                (
                    p.name,
                    p.word or p.type,
                    p.macs,
                    p.by_weight,
                    p.by_input,
                    f"{'' if p.exact else '~'}{p.by_both}",
                    format_percent(p.by_both, p.macs),
                )
                for p in self.products
            ]
            return Table(self._title(), heads, rows)
        if by == "dead":
            dead = [
                (t.name, t.channels, len(t.dead), " ".join(map(str, t.dead))) for t in self.dead
            ]
            return Table(self._title(), ("op", "channels", "dead", "which"), dead)
        if by not in ("tensor", "weight"):
            raise ValueError(f"by must be tensor, weight, dead or product, but is {by!r}")
        chosen = self.of("weight") if by == "weight" else self.tensors
        columns = (
            *("op", "tensor", "kind", "elements", "zero", f"< {self.limit:g}", "zero channels"),
            *("dead", f"zero {self.block}x{self.block} blocks", "2:4 groups"),
        )
        tensors = [
            (
                t.name,
                (t.weight if t.kind == "weight" else None) or t.tensor,
                t.kind,
                t.elements,
                format_percent(t.zeros, t.elements),
                format_percent(t.small, t.elements),
                format_percent(t.zero_channels, t.channels * t.executions),
                len(t.dead),
                format_percent(t.zero_blocks, t.blocks),
                format_percent(t.compliant, t.groups),
            )
            for t in chosen
        ]
        return Table(self._title(), columns, tensors)

    def to_json(self) -> str:
        """Return the result as JSON."""
        merge = {
            "tensors": ["namespace", "id", "kind", "tensor"],
            "channels": "range",
            "block": "same",
        }
        content = {"format": "amanda.sparsity/1", "merge": merge, **fields_of(self)}
        return render_json({**content, "charts": self._charts()})

    def _charts(self) -> list[charts.Chart]:
        shares = []
        for label, tensors in (
            ("zeros in weights", list(_each_once(self.of("weight")))),
            ("zeros in outputs", self.of("output")),
        ):
            elements = sum(tensor.elements for tensor in tensors)
            zeros = sum(tensor.zeros for tensor in tensors)
            shares.append(charts.figure(label, zeros / elements if elements else None, "%"))
        macs = sum(product.macs for product in self.products)
        both = sum(product.by_both for product in self.products)
        dead = sum(len(tensor.dead) for tensor in self.dead)
        return [
            charts.figures(
                *shares,
                charts.figure("MACs not with a zero", both / macs if macs else None, "%"),
                charts.figure("dead channels", dead),
            ),
            charts.heat("Zeros", "tensors", "name", "kind", ("zeros", "elements")),
            charts.bars(
                "MACs without those with a zero",
                [("operator", "products", "")],
                charts.measure("by weight and input", "by_both", unit="MACs"),
                charts.measure("by weight", "by_weight", unit="MACs"),
                charts.measure("by input", "by_input", unit="MACs"),
            ),
        ]

    def _repr_html_(self) -> str:
        return render_html([self.table(), self.table("dead"), self.table("product")], self)

    def _title(self) -> str:
        parts = [
            f"zeros: {_zeros(_each_once(self.of('weight')), 'weights')}, "
            f"{_zeros(self.of('output'), 'outputs')}"
        ]
        macs = sum(product.macs for product in self.products)
        if macs:
            both = sum(product.by_both for product in self.products)
            parts.append(
                f"{format_quantity(both, 'MACs')} of {format_quantity(macs, 'MACs')} are not with "
                "a zero"
            )
        if self.dead:
            channels = sum(len(tensor.dead) for tensor in self.dead)
            outputs = format_count(len(self.dead), "output")
            parts.append(f"{format_count(channels, 'dead channel')} in {outputs}")
        parts += describe_overhead("measuring", self.tool_seconds, self.wall_seconds)
        return "; ".join([*parts, *self.notes])


def _each_once(weights: Iterable[MeasuredTensor]) -> Iterator[MeasuredTensor]:
    """Yield the weights, each part of a parameter once, with the means of its executions."""
    seen = set()
    for weight in weights:
        key: object = weight.weight or id(weight)
        if key not in seen and weight.executions:
            seen.add(key)
            counts = weight.elements // weight.executions, weight.zeros // weight.executions
            yield replace(weight, elements=counts[0], zeros=counts[1])


def _zeros(tensors: Iterable[MeasuredTensor], what: str) -> str:
    every = list(tensors)
    share = format_percent(sum(t.zeros for t in every), sum(t.elements for t in every))
    return f"{share} of the {what}" if share else f"no {what} measured"
