"""Result of the memory profiler: by operator, type, module and step, and as a timeline.

All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from amanda_core.results import OpFigures, Table
from amanda_tools.kit.operators.entries import EitherWayOp
from amanda_tools.kit.operators.sums import Summed
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.chrome import TraceFile
from amanda_tools.kit.output.folders import create_folder
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_quantity,
    render_html,
    render_json,
)
from amanda_tools.memory.areas import Areas
from amanda_tools.memory.ledger import WORKSPACES

__all__ = ["AllocatingOp", "MemoryResult", "Moment", "StepMemory", "Sum"]

#: Fields of operators, steps and sums that are sizes.
_SIZES = (
    *("allocated", "live_after", "at_peak", "live", "output", "peak", "given", "building"),
    "largest_workspace",
    "kinds_at_peak.*",  # All of its values.
    "outside_of_graphs.*",
    "allocators.*",
)
#: Kinds of live buffers in the order in which they are shown.
KINDS = ("weights", "gradients", "optimizer state", "activations", WORKSPACES, "other")
#: Shown instead of figures of graphs, whose buffers are not visible.
NOT_KNOWN = "not known"
_IN_GRAPHS = "the buffers of operators in graphs are not visible"

By = Literal["module", "type", "op", "step"]


@dataclass
class AllocatingOp(EitherWayOp):
    """Memory of one operator or backward operator.

    Attributes:
        calls: Number of executions.
        allocated: Bytes of the new buffers that it returned or that autograd saved, over all
            executions.
        buffers: Number of these buffers.
        live_after: Maximum of live bytes directly after it.
        at_peak: Bytes of its buffers that were live at the peak, and of its workspace in it.
        live: Bytes of its buffers that are live now.
        output: Bytes of its outputs, for graphs, whose buffers are not visible.
        graph_calls: Number of executions in graphs, of which only the outputs are known.
        holds: Name of the parameter, or of the state of an optimizer, that its buffer is, such as
            ``exp_avg of layer.0.weight``; empty if it is none or not known.
        largest_workspace: Bytes that it had at most while it ran, besides its new buffers.
        not_measured: Number of executions in which that is not known.
    """

    calls: int = 0
    allocated: int = 0
    buffers: int = 0
    live_after: int = 0
    at_peak: int = 0
    live: int = 0
    output: int = 0
    graph_calls: int = 0
    holds: str = ""
    largest_workspace: int = 0
    not_measured: int = 0


@dataclass
class Sum:
    """Memory of several operators together; the fields are those of `AllocatingOp`.

    The largest workspace is that of one of them.
    """

    calls: int = 0
    allocated: int = 0
    at_peak: int = 0
    live: int = 0
    output: int = 0
    graph_calls: int = 0
    largest_workspace: int = 0

    def add(self, op: AllocatingOp) -> None:
        """Add one operator."""
        self.calls += op.calls
        self.allocated += op.allocated
        self.at_peak += op.at_peak
        self.live += op.live
        self.output += op.output
        self.graph_calls += op.graph_calls
        self.largest_workspace = max(self.largest_workspace, op.largest_workspace)


@dataclass
class StepMemory:
    """Memory of one step.

    Attributes:
        number: Number of the step, from 0.
        allocated: Bytes allocated in it.
        peak: Maximum of live bytes in it.
        live: Live bytes at its end.
        output: Bytes of the outputs of operators of graphs, which are not in the others.
    """

    number: int
    allocated: int = 0
    peak: int = 0
    live: int = 0
    output: int = 0


class Moment(NamedTuple):
    """One point of the timeline.

    Attributes:
        time: Time in nanoseconds.
        live: Live bytes from operators.
        given: Live bytes that existed before, as far as operators have read them.
    """

    time: int
    live: int
    given: int


@dataclass
class MemoryResult(Summed[Sum], Tabular):
    """Result of the memory profiler.

    Attributes:
        peak: Maximum of live bytes from operators, with the workspaces of their kernels.
        peak_op: Name of the operator that caused the peak, or None.
        live: Live bytes now.
        given: Maximum of live bytes that existed before, such as weights and data.
        ops: The operators in the order of their first execution.
        steps: The steps in which memory was allocated.
        notes: What was not observed, and why.
        left_out: Number of changes beyond the limit of the timeline.
        tool_seconds: The part of `wall_seconds` spent in the tool, without what the driver adds to
            call it.
        wall_seconds: Time from the first operator that the tool looked at to the last.
        timeline: Each change.
        kinds_at_peak: Live bytes at the peak by kind: ``weights``, ``gradients``, ``optimizer
            state``, ``activations``, and ``other``, which existed before and is not known to be a
            weight. Unlike `peak` they include what existed before.
        building: Bytes that were allocated while models were built, which belong to no step.
        over_time: Live bytes by module at some moments, up to the limit of the timeline.
        allocators: Device -> ``current`` and ``peak`` bytes that the framework's allocator reports,
            since the program began. For graphs on devices.
    """

    peak: int = 0
    peak_op: str | None = None
    live: int = 0
    given: int = 0
    ops: list[AllocatingOp] = field(default_factory=list)
    steps: list[StepMemory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: int = 0
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    timeline: list[Moment] = field(default_factory=list, repr=False)
    kinds_at_peak: dict[str, int] = field(default_factory=dict)
    building: int = 0
    over_time: Areas = field(default_factory=lambda: Areas([], []), repr=False)
    allocators: dict[str, dict[str, int]] = field(default_factory=dict)

    _sum = Sum
    records = "ops", AllocatingOp

    def _order(self, found: Sum) -> tuple[int, int]:
        return -found.at_peak, -found.allocated

    @property
    def allocated(self) -> int:
        """Return the bytes of all buffers that operators allocated, except those in graphs."""
        return sum(op.allocated for op in self.ops)

    @property
    def is_known(self) -> bool:
        """Return True if all buffers were visible: no operator ran in a graph."""
        return not self.total.graph_calls

    def figures(self) -> dict[str, float | None]:
        """Return the sizes in bytes. Where operators of graphs ran, none is known but the peak of
        an allocator.
        """
        if not self.is_known:
            peaks = [found["peak"] for found in self.allocators.values()]
            return {"peak": sum(peaks)} if peaks else {}
        return {"peak": self.peak, "live": self.live, "allocated": self.allocated}

    def op_figures(self) -> Iterator[OpFigures]:
        """Yield the bytes of each operator in the form in which tools share them."""
        for op in self.ops:
            values: dict[str, int | float | str] = {
                "allocated (B)": op.allocated,
                "alive at the peak (B)": op.at_peak,
            }
            # For operators of graphs only the size of the outputs is known.
            yield op.figures({"outputs (B)": op.output} if op.output else values)

    def table(self, by: By = "module", depth: int | None = 3) -> Table:
        """Return a table, in bytes.

        Args:
            by: One row for each ``module``, ``type``, ``op`` or ``step``.
            depth: For modules, the maximum number of parts of a path; None for all.

        Raises:
            ValueError: `by` has another value.
        """
        if by == "step":
            steps: list[tuple[object, ...]] = [
                (
                    s.number,
                    *([NOT_KNOWN] * 3 if s.output else [s.allocated, s.peak, s.live]),
                    *([] if self.is_known else [s.output]),
                )
                for s in self.steps
            ]
            more = () if self.is_known else ("outputs B",)
            if self.building:
                steps.insert(0, ("(model building)", self.building, "", "", *("" for _ in more)))
            heads = ("step", "allocated B", "peak B", "live at end B", *more)
            return Table(self._title(), heads, steps)
        # Once, since it looks at all operators.
        of_graphs = ("outputs B",) if any(op.output for op in self.ops) else ()
        inside = ("workspace B",) if any(op.largest_workspace for op in self.ops) else ()
        if by == "op":
            sizes = ("allocated B", "live after B", "at peak B", "live now B")
            heads = ("op", "phase", "calls", *sizes, *inside)
            ops = [
                (
                    op.holds or op.name,
                    op.phase,
                    op.calls,
                    *_known(op, op.allocated, op.live_after, op.at_peak, op.live),
                    *[op.largest_workspace for _ in inside],
                    *[op.output for _ in of_graphs],
                )
                for op in self.ops
            ]
            return Table(self._title(), (*heads, *of_graphs), ops)
        sums = self._sums(by, depth)
        if sums is None:
            raise ValueError(f"by must be module, type, op or step, but is {by!r}")
        columns = (by, "calls", "allocated B", "at peak B", "live now B", *inside)
        rows = [
            (
                name or "(all)",
                found.calls,
                *_known(found, found.allocated, found.at_peak, found.live),
                *[found.largest_workspace for _ in inside],
                *[found.output for _ in of_graphs],
            )
            for name, found in sums.items()
        ]
        return Table(self._title(), (*columns, *of_graphs), rows)

    def to_json(self) -> str:
        """Return the result as JSON, without the timeline, which is a file of its own."""
        content = fields_of(self)
        del content["timeline"], content["over_time"]
        content["allocated"] = self.allocated
        if not self.is_known:
            names = ("peak", "peak_op", "live", "given", "allocated", "kinds_at_peak")
            content["outside_of_graphs"] = {name: content[name] for name in names}
            content |= dict.fromkeys(names)
        return render_json(
            {
                "format": "amanda.memory/1",
                "unit": "B",
                "units": dict.fromkeys(_SIZES, "B") | {"tool_seconds": "s", "wall_seconds": "s"},
                "merge": {"kinds_at_peak": "range"},
                **content,
                **self._sums_as_json(),
                "moments": self.over_time.times,
                "over_time": self.over_time.modules,
                "charts": self._charts(),
            }
        )

    def _charts(self) -> list[charts.Chart]:
        if not self.is_known:
            outputs = charts.measure("outputs", "output", unit="B")
            sizes = charts.icicle("Size of outputs by module", "ops", outputs)
            figures = charts.figures(
                *(
                    charts.figure(f"peak of {device}", found["peak"], "B", "of the allocator")
                    for device, found in self.allocators.items()
                ),
                charts.figure("peak", None if self.allocators else NOT_KNOWN, "", _IN_GRAPHS),
                charts.figure("outputs in a step", self._step_outputs, "B", "of graphs, median"),
            )
            return [
                figures,
                sizes,
                charts.bars("Largest outputs", [("operator", "ops", "")], outputs),
            ]
        at_peak = charts.measure("alive at the peak", "at_peak")
        allocated = charts.measure("allocated in all", "allocated")
        kinds = self._describe_kinds()
        return [
            charts.figures(
                charts.figure("peak", self.peak, "B", f"after {self.peak_op}", self.peak_op),
                charts.figure("live at the end", self.live, "B"),
                charts.figure("allocated in all", self.allocated, "B"),
                charts.figure("there before", self.given, "B"),
            ),
            {
                "kind": "lines",
                "title": "Live memory over time",
                "note": f"At the peak: {kinds}." if kinds else "",
                "part": "over_time",
                "list": "live",
                "x": "moments",
                "x_label": "time",
                "x_unit": "s",
                "stack": True,
                "unit": "B",
            },
            charts.icicle("Memory by module", "ops", *(at_peak, allocated)),
            charts.bars(
                "At the peak",
                [
                    ("buffer", "ops", "holds|name"),
                    ("operator", "ops", ""),
                    ("layer", "ops", "module"),
                    ("type", "by_type", ""),
                ],
                *(at_peak, allocated),
            ),
            charts.lines(
                "Memory of steps",
                "steps",
                "number",
                ("peak", "live", "allocated"),
                labels=("peak", "live at its end", "allocated"),
                half=True,
                x_label="step",
            ),
        ]

    def write(self, folder: Path | str) -> Sequence[Path]:
        """Write ``timeline.json``, or ``timeline.json.gz``, for Perfetto and chrome://tracing.

        Returns:
            The file.
        """
        trace = TraceFile("amanda memory")
        for moment in self.timeline:
            values = {"from operators": moment.live, "from before": moment.given}
            trace.add_counter("bytes", moment.time, values)
        return [trace.write(create_folder(folder) / "timeline.json")]

    def _repr_html_(self) -> str:
        return render_html([self.table(), self.table("type"), self.table("step")], self)

    def _title(self) -> str:
        after = f" after {self.peak_op}" if self.peak_op else ""
        parts = [
            f"peak {format_quantity(self.peak, 'B')}{after}",
            f"{format_quantity(self.allocated, 'B')} allocated",
            f"{format_quantity(self.live, 'B')} live",
            f"{format_quantity(self.given, 'B')} were there before",
        ]
        if not self.is_known:
            parts = [f"peak, allocated and live memory are {NOT_KNOWN}: {_IN_GRAPHS}"]
            parts += [
                f"the allocator of {device} reports a peak of {format_quantity(found['peak'], 'B')}"
                for device, found in self.allocators.items()
            ]
            outputs = self._step_outputs
            if outputs is not None:
                parts.append(f"outputs in a step of graphs: {format_quantity(outputs, 'B')}")
        elif self._describe_kinds():
            parts.append(f"at the peak {self._describe_kinds()}")
        missing = sum(op.not_measured for op in self.ops)
        if missing and self.is_known:
            every = missing == sum(op.calls for op in self.ops)
            where = "an operator" if every else f"{missing:,} executions of operators"
            parts.append(f"without what kernels allocate and free inside {where}")
        parts += describe_overhead("the profiler", self.tool_seconds, self.wall_seconds)
        return "; ".join([*parts, *self.notes])

    @property
    def _step_outputs(self) -> int | None:
        """Return the bytes of outputs of graphs in a step, the median; None if there are none."""
        sizes = sorted(step.output for step in self.steps if step.output)
        return sizes[len(sizes) // 2] if sizes else None

    def _describe_kinds(self) -> str:
        return ", ".join(
            f"{format_quantity(self.kinds_at_peak[kind], 'B')} {kind}"
            for kind in KINDS
            if self.kinds_at_peak.get(kind)
        )


def _known(found: AllocatingOp | Sum, *sizes: int) -> Sequence[object]:
    """Return sizes, or that they are not known if some executions were in graphs."""
    if found.graph_calls:
        return [NOT_KNOWN] * len(sizes)
    return sizes
