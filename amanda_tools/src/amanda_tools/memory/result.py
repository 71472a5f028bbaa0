"""What the memory profiler found: by operator, type, module and step, and as a timeline.

Owns the sums and their forms. All sizes are in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from amanda_core.results import OpFigures, Table
from amanda_tools.operators.entries import EitherWayOp
from amanda_tools.operators.sums import Summed
from amanda_tools.output.chrome import TraceFile
from amanda_tools.output.folders import made
from amanda_tools.output.rendering import dataframe, html_of, scaled, shares

__all__ = ["AllocatingOp", "MemoryResult", "Moment", "StepMemory", "Sum"]

By = Literal["module", "type", "op", "step"]


@dataclass
class AllocatingOp(EitherWayOp):
    """One operator, or one backward operator.

    Attributes:
        calls: How often it ran.
        allocated: Bytes of new buffers that it gave or keeps, of all executions.
        buffers: How many these were.
        live_after: The most bytes that were alive right after it.
        at_peak: Bytes that it had given and that were alive at the peak.
        live: Bytes that it had given and that are alive now.
        output: Bytes of its outputs, where a graph's buffers cannot be told.
    """

    calls: int = 0
    allocated: int = 0
    buffers: int = 0
    live_after: int = 0
    at_peak: int = 0
    live: int = 0
    output: int = 0


@dataclass
class Sum:
    """What several operators allocated together; the numbers are those of `AllocatingOp`."""

    calls: int = 0
    allocated: int = 0
    at_peak: int = 0
    live: int = 0
    output: int = 0

    def add(self, op: AllocatingOp) -> None:
        """Add one operator."""
        self.calls += op.calls
        self.allocated += op.allocated
        self.at_peak += op.at_peak
        self.live += op.live
        self.output += op.output


@dataclass
class StepMemory:
    """One step.

    Attributes:
        number: From 0.
        allocated: Bytes allocated in it.
        peak: The most bytes alive in it.
        live: Bytes alive at its end.
    """

    number: int
    allocated: int = 0
    peak: int = 0
    live: int = 0


class Moment(NamedTuple):
    """A point of the timeline.

    Attributes:
        time: In nanoseconds.
        live: Bytes alive that operators had given.
        given: Bytes alive that were there before, as far as some operator had read them.
    """

    time: int
    live: int
    given: int


@dataclass
class MemoryResult(Summed[Sum]):
    """What was allocated.

    Attributes:
        peak: The most bytes that were alive at once, of what operators gave.
        peak_op: Name of the operator after which that was, or None.
        live: Bytes alive now.
        given: The most bytes alive of what was there before, such as weights and data.
        ops: The operators in the order of their first execution.
        steps: The steps in which something was allocated.
        notes: What is not seen, and why.
        left_out: Changes that are not in the timeline, since it has a limit.
        tool_seconds: Time that the profiler itself took, of `wall_seconds`. What the driver adds to
            reach the operators is not in it.
        wall_seconds: Time from the first to the last operator that was looked at.
        timeline: Each change.
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

    _sum = Sum

    def _order(self, found: Sum) -> tuple[int, int]:
        return -found.at_peak, -found.allocated

    @property
    def allocated(self) -> int:
        """Bytes of all buffers that operators gave."""
        return sum(op.allocated for op in self.ops)

    def op_figures(self) -> Iterator[OpFigures]:
        """Bytes of each operator, for the results of other tools."""
        for op in self.ops:
            values: dict[str, int | float | str] = {
                "allocated (B)": op.allocated,
                "alive at the peak (B)": op.at_peak,
            }
            # Of a graph's operators only the size of the outputs is known.
            yield op.figures({"outputs (B)": op.output} if op.output else values)

    def table(self, by: By = "module", depth: int | None = 3) -> Table:
        """A table for people, in bytes.

        Args:
            by: One row for each ``module``, ``type``, ``op`` or ``step``.
            depth: Of modules: how deep, counted in parts of the path; None for all.

        Raises:
            ValueError: `by` is something else.
        """
        if by == "step":
            steps = [(s.number, s.allocated, s.peak, s.live) for s in self.steps]
            return Table(self._title(), ("step", "allocated B", "peak B", "live at end B"), steps)
        if by == "op":
            sizes = ("allocated B", "live after B", "at peak B", "live now B")
            heads = ("op", "phase", "calls", *sizes)
            ops = [
                (
                    op.name,
                    op.phase,
                    op.calls,
                    op.allocated,
                    op.live_after,
                    op.at_peak,
                    op.live,
                    *self._of_graphs(op.output),
                )
                for op in self.ops
            ]
            return Table(self._title(), (*heads, *self._graph_columns()), ops)
        sums = self._sums(by, depth)
        if sums is None:
            raise ValueError(f"by must be module, type, op or step, and is {by!r}")
        columns = (by, "calls", "allocated B", "at peak B", "live now B")
        rows = [
            (
                name or "(all)",
                found.calls,
                found.allocated,
                found.at_peak,
                found.live,
                *self._of_graphs(found.output),
            )
            for name, found in sums.items()
        ]
        return Table(self._title(), (*columns, *self._graph_columns()), rows)

    def to_json(self) -> str:
        """All of it but the timeline, which is a file of its own."""
        content = asdict(self)
        del content["timeline"]
        return json.dumps(
            {
                "format": "amanda.memory/1",
                "unit": "B",
                "allocated": self.allocated,
                **content,
                **self._sums_as_json(),
            },
            indent=1,
        )

    def to_dataframe(self) -> Any:
        """One row for each operator, as a `pandas.DataFrame`; needs pandas.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return dataframe(AllocatingOp, self.ops)

    def write(self, folder: Path | str) -> Sequence[Path]:
        """Write ``timeline.json``, or ``timeline.json.gz``, for Perfetto and chrome://tracing.

        Returns:
            The file.
        """
        trace = TraceFile("amanda memory")
        for moment in self.timeline:
            values = {"from operators": moment.live, "from before": moment.given}
            trace.add_counter("bytes", moment.time, values)
        return [trace.write(made(folder) / "timeline.json")]

    def _repr_html_(self) -> str:
        return html_of([self.table(), self.table("type"), self.table("step")])

    def _title(self) -> str:
        after = f" after {self.peak_op}" if self.peak_op else ""
        parts = [
            f"peak {scaled(self.peak, 'B')}{after}",
            f"{scaled(self.allocated, 'B')} allocated",
            f"{scaled(self.live, 'B')} live",
            f"{scaled(self.given, 'B')} were there before",
        ]
        parts += shares("the profiler", self.tool_seconds, self.wall_seconds)
        return "; ".join([*parts, *self.notes])

    def _graph_columns(self) -> tuple[str, ...]:
        return ("outputs B",) if any(op.output for op in self.ops) else ()

    def _of_graphs(self, output: int) -> list[int]:
        return [output] if self._graph_columns() else []
