"""Result of the FLOPs profiler: by operator, by type and by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from amanda_core.results import OpFigures, Table
from amanda_tools.flops.units import UnitCost
from amanda_tools.kit.operators.entries import OpFacts, with_parents
from amanda_tools.kit.operators.sums import OUTSIDE, Summed
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_count,
    format_quantity,
    render_html,
    render_json,
)

__all__ = ["CountedOp", "FlopsResult", "Sum"]

By = Literal["module", "type", "op", "unknown"]


@dataclass
class CountedOp(OpFacts):
    """One operator and its cost.

    Attributes:
        problem: Why some or all of its executions are not counted, or None.
        calls: Number of executions.
        macs: Multiply-accumulates of all executions.
        flops: Floating-point operations of all executions: twice the multiply-accumulates, plus
            single operations.
        backward_calls: Number of times that its gradients were computed.
        backward_macs: Multiply-accumulates of its gradients.
        backward_flops: Floating-point operations of its gradients.
        weights: The parameters, or parts of them, that its first execution read.
        moved: Bytes of the tensors that its first execution read and wrote; None if not known.
    """

    problem: str | None = None
    calls: int = 0
    macs: int = 0
    flops: int = 0
    backward_calls: int = 0
    backward_macs: int = 0
    backward_flops: int = 0
    weights: list[str] = field(default_factory=list)
    moved: int | None = None

    @property
    def kind(self) -> str:
        """Return the common type, or the framework's if there is none."""
        return self.word or self.type


@dataclass
class Sum:
    """Cost of several operators together; the fields are those of `CountedOp`.

    Attributes:
        parameters: Number of elements of the parameters of a module and of those inside it; None
            for operators outside modules. A parameter that several modules share counts at one.
    """

    calls: int = 0
    macs: int = 0
    flops: int = 0
    backward_macs: int = 0
    backward_flops: int = 0
    unknown: int = 0
    parameters: int | None = None

    def add(self, op: CountedOp) -> None:
        """Add one operator."""
        self.calls += op.calls
        self.macs += op.macs
        self.flops += op.flops
        self.backward_macs += op.backward_macs
        self.backward_flops += op.backward_flops
        self.unknown += op.problem is not None


@dataclass
class FlopsResult(Summed[Sum], Tabular):
    """Result of the FLOPs profiler.

    Attributes:
        include: The kinds that are counted: ``matmul``, ``norm``, ``elementwise``.
        causal: Whether causal attention counts in ``full`` or by ``half``.
        ops: The operators that are counted or have a problem, in the order of their first
            execution.
        tool_seconds: The part of `wall_seconds` spent in the tool, without what the driver adds to
            call it.
        wall_seconds: Time from the first operator that the tool looked at to the last.
        notes: What was not observed, and why.
        step: The cost of one step; None if none has ended.
        passes: The cost of one call of each outermost module, the largest first. None are known
            where the driver does not report calls, as in graphs.
        parameters: Module -> number of elements of its parameters, without those of modules inside
            it, of all modules that ran.
    """

    include: list[str]
    causal: str
    ops: list[CountedOp] = field(default_factory=list)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    step: UnitCost | None = None
    passes: list[UnitCost] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)

    _sum = Sum
    records = "ops", CountedOp

    def _order(self, found: Sum) -> int:
        return -found.flops

    @property
    def total(self) -> Sum:
        """Return the sum over all operators."""
        return replace(super().total, parameters=sum(self.parameters.values()))

    def by_module(self) -> dict[str, Sum]:
        """Return a sum for each module path, including the modules inside it; ``""`` is the whole
        program.
        """
        found = super().by_module()
        if not any(op.calls for op in self.ops):
            return found  # Where nothing ran, nothing says how large the model is.
        rank = {path: (number, 0) for number, path in enumerate(found)}
        latest = (0, 0)
        for path, number in self.parameters.items():
            for around in with_parents(path):
                if around not in rank:
                    # One without an operator follows the one before it in the model.
                    latest = rank[around] = (latest[0], latest[1] + 1)
                elif around == path:
                    latest = rank[path]
                one = found.setdefault(around, Sum())
                one.parameters = (one.parameters or 0) + number
        order = sorted(found, key=lambda path: [rank[around] for around in with_parents(path)])
        return {path: found[path] for path in order}

    @property
    def macs(self) -> int:
        """Return the multiply-accumulates of the forward pass."""
        return self.total.macs

    @property
    def flops(self) -> int:
        """Return the floating-point operations of the forward pass."""
        return self.total.flops

    @property
    def backward_macs(self) -> int:
        """Return the multiply-accumulates of the gradients."""
        return self.total.backward_macs

    @property
    def unknown(self) -> list[CountedOp]:
        """Return the operators with executions that are not counted; `problem` says why."""
        return [op for op in self.ops if op.problem is not None]

    def figures(self) -> dict[str, float | None]:
        """Return the floating-point operations of the run, a step, a forward pass and a sample."""
        total, step = self.total, self.step
        of_pass = self.passes[0] if self.passes else None
        known = of_pass is not None and of_pass.samples
        return {
            "step": None if step is None else step.flops + step.backward_flops,
            "pass": None if of_pass is None else of_pass.flops,
            "sample": of_pass.flops / known if of_pass is not None and known else None,
            "total": total.flops + total.backward_flops,
            "forward": total.flops,
            "backward": total.backward_flops,
            "macs": total.macs,
            "not_counted": len(self.unknown),
        }

    def op_figures(self) -> Iterator[OpFigures]:
        """Yield the multiply-accumulates of each operator in the form in which tools share them."""
        for op in self.ops:
            values: dict[str, int | float | str] = {
                "macs": op.macs,
                "backward macs": op.backward_macs,
            }
            if op.problem is not None:
                values["not counted"] = op.problem
            yield op.figures(values)

    def table(self, by: By = "module", depth: int | None = 3) -> Table:
        """Return a table.

        Args:
            by: One row for each ``module``, ``type``, ``op``, or ``unknown`` operator.
            depth: For modules, the maximum number of parts of a path; None for all.

        Raises:
            ValueError: `by` has another value.
        """
        if by == "unknown":
            problems = [
                (op.name, op.kind, op.calls, op.problem, op.source or "") for op in self.unknown
            ]
            return Table("Not counted", ("op", "type", "calls", "why", "source"), problems)
        if by == "op":
            rows = [(op.name, op.kind, *_cells(self._sum_of([op]))) for op in self.ops]
            return Table(self._title(), ("op", "type", *_HEADINGS), rows)
        sums = self._sums(by, depth)
        if sums is None:
            raise ValueError(f"by must be module, type, op or unknown, but is {by!r}")
        if by == "type":
            named = [(name, *_cells(found)) for name, found in sums.items()]
            return Table(self._title(), (by, *_HEADINGS), named)
        if OUTSIDE in sums:
            sums[OUTSIDE].parameters = self.parameters.get("", 0)
        named = [(name or "(all)", one.parameters or 0, *_cells(one)) for name, one in sums.items()]
        return Table(self._title(), (by, "parameters", *_HEADINGS), named)

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        return render_json(
            {
                "format": "amanda.flops/1",
                "flops_per_mac": 2,
                "units": {
                    **dict.fromkeys(("macs", "backward_macs"), "MACs"),
                    **dict.fromkeys(("flops", "backward_flops"), "FLOPs"),
                    "moved": "B",
                    **dict.fromkeys(("tool_seconds", "wall_seconds"), "s"),
                },
                "merge": {"parameters": "shared", "passes": ["module"], "distinct": "max"},
                **fields_of(self),
                "total": self.total,
                **self._sums_as_json(),
                "charts": self._charts(),
            }
        )

    def _charts(self) -> list[charts.Chart]:
        total, unknown = self.total, self.unknown
        forward = charts.measure("forward", "macs", unit="MACs")
        backward = charts.measure("backward", "backward_macs", unit="MACs")
        both = charts.measure(
            "forward and backward",
            "macs",
            "backward_macs",
            unit="MACs",
            labels=["forward", "backward"],
        )
        measures = [both, forward, backward] if total.backward_macs else [forward]
        missing = len(unknown) or None
        return [
            charts.figures(
                *self._units(),
                charts.figure("in all, forward", total.macs, "MACs", f"{total.calls} calls"),
                charts.figure("in all, backward", total.backward_macs or None, "MACs"),
                charts.figure("in all, FLOPs forward", total.flops, "FLOPs"),
                charts.figure("operators not counted", missing),
            ),
            charts.icicle("MACs by module", "ops", *measures),
            charts.bars(
                "Most",
                [("operator", "ops", ""), ("layer", "ops", "module"), ("type", "ops", "word|type")],
                *measures,
            ),
            {
                "kind": "roofline",
                "title": "Speed",
                "note": "Forward, over the FLOPs for each byte read or written once. Larger points "
                "take longer. The line is the best that any operator reached here.",
                "part": "ops",
                "needs": ["amanda.latency/1"],
            },
        ]

    def _units(self) -> Iterator[charts.Chart]:
        """Yield the figures of a forward pass, of a sample and of a step."""
        if self.passes:
            cost = self.passes[0]
            batch = "" if cost.samples is None else f", a batch of {cost.samples}"
            detail = f"of {cost.module}{batch}{cost.of_how_many}"
            yield charts.figure("a forward pass", cost.macs, "MACs", detail)
            sample = cost.macs / cost.samples if cost.samples else None
            yield charts.figure("one sample", sample, "MACs", "forward")
        if self.step is not None:
            both = self.step.macs + self.step.backward_macs
            detail = f"forward and backward{self.step.of_how_many}"
            yield charts.figure("a step", both, "MACs", detail)

    def _repr_html_(self) -> str:
        tables = [self.table(), self.table("type")]
        if self.unknown:
            tables.append(self.table("unknown"))
        return render_html(tables, self)

    def _title(self) -> str:
        total = self.total
        macs, flops = format_quantity(total.macs, "MACs"), format_quantity(total.flops, "FLOPs")
        parts = [f"in all {macs} ({flops}) forward"]
        if total.backward_macs or total.backward_flops:
            macs = format_quantity(total.backward_macs, "MACs")
            flops = format_quantity(total.backward_flops, "FLOPs")
            parts[0] += f", {macs} ({flops}) backward"
        parts += [cost.describe() for cost in self.passes[:_PASSES]]
        if self.step is not None:
            parts.append(self.step.describe())
        parts.append(f"1 MAC = 2 FLOPs; counted: {', '.join(self.include)}")
        if self.causal == "half":
            parts.append("causal attention by half")
        if self.unknown:
            types = list(dict.fromkeys(op.kind for op in self.unknown))
            more = ", ..." if len(types) > _TYPES else ""
            parts.append(
                f"NOT counted: {format_count(len(self.unknown), 'operator')} "
                f"({', '.join(types[:_TYPES])}{more})"
            )
        parts += describe_overhead("counting", self.tool_seconds, self.wall_seconds)
        return "; ".join([*parts, *self.notes])


_HEADINGS = ("calls", "MACs", "FLOPs", "backward MACs", "backward FLOPs", "not counted")
#: Number of operator types, and of outermost modules, that a title lists.
_TYPES, _PASSES = 8, 2


def _cells(found: Sum) -> tuple[int, ...]:
    return (
        found.calls,
        found.macs,
        found.flops,
        found.backward_macs,
        found.backward_flops,
        found.unknown,
    )
