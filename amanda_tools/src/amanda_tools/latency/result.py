"""Result of the latency profiler: by operator, type, module, step and thread, and a trace file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from amanda_core.results import OpFigures, Table
from amanda_tools.kit.operators.entries import with_parents
from amanda_tools.kit.operators.sums import OUTSIDE, Summed
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.chrome import Span, TraceFile
from amanda_tools.kit.output.folders import create_folder
from amanda_tools.kit.output.rendering import (
    Tabular,
    fields_of,
    format_count,
    format_percent,
    render_html,
    render_json,
)
from amanda_tools.latency.advice import advise
from amanda_tools.latency.kernels import Kernel
from amanda_tools.latency.times import DRIVER, StepTime, ThreadTime, TimedOp, Times, quantiles

__all__ = ["LatencyResult"]

By = Literal["module", "type", "op", "step", "thread", "kernel"]


@dataclass
class LatencyResult(Summed[Times], Tabular):
    """Result of the latency profiler.

    Attributes:
        ops: The operators and backward operators in the order of their first execution.
        steps: The steps in which operators ran.
        threads: The threads on which operators ended.
        graph_busy: Nanoseconds in which at least one operator of a graph was running.
        graph_total: Sum of the times of the graphs' operators; greater than `graph_busy` if they
            overlap.
        notes: What was not timed, or timed with limitations.
        left_out: Number of executions beyond the limit of the trace file; `ops` include them.
        tool_seconds: The part of `wall_seconds` spent in the tool, without what the driver adds to
            call it.
        wall_seconds: Time from the first operator that the tool looked at to the last.
        spans: Contents of the trace file.
        kernels: The kernels, if they were requested; `Kernel.op` is an index into `ops`.
        between: Module path -> nanoseconds in which no operator was running, without those of the
            modules inside. The time between two operators belongs to the innermost module that
            contains both, or to ``""``.
        plain: Nanoseconds of a step without the profiler; None if there was none.
        plain_steps: The steps that ran without it.
        others: Names of the tools that ran together with the profiler.
    """

    ops: list[TimedOp] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    threads: list[ThreadTime] = field(default_factory=list)
    graph_busy: int = 0
    graph_total: int = 0
    notes: list[str] = field(default_factory=list)
    left_out: int = 0
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    spans: list[Span] = field(default_factory=list, repr=False)
    kernels: list[Kernel] = field(default_factory=list, repr=False)
    between: dict[str, int] = field(default_factory=dict)
    plain: int | None = None
    others: list[str] = field(default_factory=list)
    plain_steps: list[StepTime] = field(default_factory=list)

    _sum = Times
    records = "ops", TimedOp

    def _order(self, found: Times) -> int:
        return -found.typical

    @property
    def wall(self) -> int:
        """Return the nanoseconds of all steps that count, from start to end."""
        return sum(step.wall for step in self.counted)

    @property
    def counted(self) -> list[StepTime]:
        """Return the steps that count: all except the warm-up."""
        return [step for step in self.steps if not step.warm_up]

    @property
    def ended(self) -> list[StepTime]:
        """Return the steps from which medians are: those that count and ended, if there are any."""
        return [step for step in self.counted if step.ended] or self.counted

    @property
    def waiting(self) -> int:
        """Return the nanoseconds in collectives, waiting for other processes included."""
        return sum(op.self for op in self.ops if op.waits)

    @property
    def advice(self) -> str:
        """Return a sentence that says what to do; empty if other tools work between operators."""
        rest, ops = (sum(getattr(step, name) for step in self.counted) for name in ("rest", "ops"))
        if self.others or rest < 0 or not (ops and self.ops):
            return ""
        name, found = next(iter(self.by_type().items()))
        share = found.typical / (self.total.typical or 1)
        waiting = self.waiting
        return advise(
            self.wall, ops, rest, {op.namespace for op in self.ops}, (name, share), waiting
        )

    def take_op_figures(self, figures: Mapping[str, Sequence[OpFigures]]) -> None:
        """Note the tools that ran together with the profiler."""
        self.others = list(figures)
        if figures:
            self.notes.append(f"includes the time of other tools: {', '.join(figures)}")

    def by_module(self) -> dict[str, Times]:
        """Return the times for each module path, including the modules inside it; ``""`` is the
        whole.

        They include the time between operators, so the whole is the time of the steps without the
        profiler's own.
        """
        sums = super().by_module()
        for module, time in self.between.items():
            for path in with_parents(module):
                sums.setdefault(path, Times()).between += time
        return sums

    def figures(self) -> dict[str, float | None]:
        """Return the times of a step, in seconds."""
        steps = self.ended
        if not any(step.wall for step in steps):
            return {}
        middle, last, _ = quantiles(step.wall for step in steps)
        return {"step_median": middle / 1e9, "step_p95": last / 1e9}

    def op_figures(self) -> Iterator[OpFigures]:
        """Yield the times of each operator, in seconds, in the form in which tools share them."""
        for op in self.ops:
            values: dict[str, int | float | str] = {"self (s)": op.self / 1e9}
            if op.device is not None:
                values["device (s)"] = op.device_self / 1e9
            if self.kernels:
                values["kernels (s)"] = op.kernel_time / 1e9
            yield op.figures(values)

    def table(self, by: By = "type", depth: int | None = 3) -> Table:
        """Return a table, in milliseconds.

        Args:
            by: One row for each ``type``, ``module``, ``op``, ``step``, ``thread`` or ``kernel``.
                Types and operators are in the order of their calls at the median time of each.
            depth: For modules, the maximum number of parts of a path; None for all.

        Raises:
            ValueError: `by` has another value.
        """
        # Once, since each looks at all operators or steps.
        device, wall = self._device_columns(), self.wall
        if by == "step":
            columns = ("step", "calls", "wall ms", "ops ms", "ops share", "tool ms", "driver ms")
            steps = [
                (
                    f"{s.number}{_mark(s)}" if s.warm_up or not s.calls else s.number,
                    s.calls or "",
                    *_ms(s.wall),
                    *(_cells_of(s) if s.calls else ("",) * 5),
                )
                for s in sorted([*self.steps, *self.plain_steps], key=lambda s: s.number)
            ]
            return Table(self._title(), (*columns, "rest ms"), steps)
        if by == "thread":
            threads = [(t.name, t.calls, *_ms(t.self)) for t in self.threads]
            return Table(self._title(), ("thread", "calls", "self ms"), threads)
        if by == "kernel":
            return Table(self._title(), ("kernel", "op", "device", "ms"), self._kernel_rows())
        if by == "op":
            of_op = ("op", "self ms", "share", "phase", "calls", "median ms", "p95 ms", "spread ms")
            ops: list[tuple[object, ...]] = [
                (
                    op.name,
                    *_ms(op.self),
                    format_percent(op.self, wall),
                    op.phase,
                    op.calls,
                    *_ms(op.median, op.p95, op.spread),
                    *_on_device(device, op.device_self, op.kernel_time),
                )
                for op in sorted(self.ops, key=lambda op: -op.typical)
            ]
            rows = self._with_apart(ops, 5)
            return Table(self._title(), (*of_op, *device), rows)
        sums = self._sums(by, depth)
        if sums is None:
            raise ValueError(f"by must be module, type, op, step, thread or kernel, not {by!r}")
        # The first columns stay where the terminal is narrow.
        times, whole = ["self ms", "share", "at median ms"], wall
        if by == "module":
            times, whole = ["time ms", "share", "between ms"], sums[""].time
            sums = self._with_outside(sums)
        heads = (by, *times, "calls", "forward ms", "backward calls", "backward ms")
        rows = [
            (
                name or "(all)",
                *_ms(found.time),
                format_percent(found.time, whole),
                *_ms(found.between if by == "module" else found.typical),
                found.calls,
                *_ms(found.forward),
                found.backward_calls,
                *_ms(found.backward),
                *_on_device(device, found.device, found.kernel_time),
            )
            for name, found in sums.items()
        ]
        if by == "type":
            rows = self._with_apart(rows, 5)
        return Table(self._title(), (*heads, *device), rows)

    def to_json(self) -> str:
        """Return the result as JSON, without the single executions, which are in the trace file."""
        content = {name: value for name, value in vars(self).items() if name not in _APART}
        content["steps"] = [{**fields_of(step), "rest": step.rest} for step in self.steps]
        return render_json(
            {
                "format": "amanda.latency/1",
                "unit": "ns",
                "units": dict.fromkeys(_TIMES, "ns") | {"tool_seconds": "s", "wall_seconds": "s"},
                **content,
                "total": self.total,
                **self._sums_as_json(),
                "charts": self._charts(),
            }
        )

    def _charts(self) -> list[charts.Chart]:
        steps = self.ended
        wall, ops = self.wall, sum(step.ops for step in self.counted)
        middle, last, _ = quantiles(step.wall for step in steps)
        longest = max(self.ops, key=lambda op: op.typical, default=None)
        count = format_count(len(steps), "step")
        of_others = f", and of other tools: {', '.join(self.others)}" if self.others else ""
        without = self._name_plain_steps()
        items = [
            charts.figure("a step, median", middle, "ns", f"of {count}{of_others}"),
            charts.figure("a step, p95", last if len(steps) > 1 else None, "ns"),
            charts.figure("in operators", ops / wall if wall else None, "%", self.advice),
            charts.figure("a step without the profiler", self.plain, "ns", without),
        ]
        if longest is not None:
            detail = f"median of {format_count(longest.calls, 'call')} of {longest.name}"
            items.append(charts.figure("longest", longest.median, "ns", detail, longest.name))
        if (waiting := self.waiting) and wall:
            detail = "waiting for other processes included"
            items.append(charts.figure("in collectives", waiting / wall, "%", detail))
        typical = charts.measure("calls at their median time", "typical", unit="ns")
        own = charts.measure("own time", "self")
        kernels = [charts.measure("on the device", "device_self")] if self._is_on_device() else []
        return [
            charts.figures(*(items if wall else items[4:])),
            charts.icicle(
                "Time by module",
                "ops",
                own,
                *kernels,
                rest={"part": "between", "label": "(between operators)", "of": own["label"]},
                note="Own time of operators, forward and backward, and the time between them"
                f"{of_others}.",
            ),
            charts.bars(
                "Longest",
                [("operator", "ops", ""), ("layer", "ops", "module"), ("type", "ops", "word|type")],
                *(typical, own, *kernels),
            ),
            charts.lines(
                "Steps",
                "steps",
                "number",
                ("ops", "rest", "driver", "tool"),
                labels=("operators", "between operators", "driver, to call it", "profiler"),
                x_label="step",
                style="columns",
                half=True,
                stack=True,
                marked="warm_up",
                note="A step of warm-up is pale, and in none of the other figures."
                f"{f' {without}.' if without else ''}"
                f"{' Other tools work between operators.' if self.others else ''}",
            ),
        ]

    def _is_on_device(self) -> bool:
        return any(op.device for op in self.ops)

    def write(self, folder: Path | str) -> Sequence[Path]:
        """Write ``trace.json`` or ``trace.json.gz``, for Perfetto and chrome://tracing.

        Returns:
            The file.
        """
        trace = TraceFile("amanda latency")
        trace.add_spans(self.spans)
        return [trace.write(create_folder(folder) / "trace.json")]

    def write_tensorboard(self, folder: Path) -> None:
        """Write the times of each step and each operator type for TensorBoard.

        Args:
            folder: Folder of the TensorBoard run.

        Raises:
            ImportError: tensorboard is not installed.
        """
        from amanda_tools.kit.output.scalars import write_scalars

        rows = [("step/wall_ms", s.number, s.wall / 1e6) for s in self.steps]
        rows += [("step/ops_ms", s.number, s.ops / 1e6) for s in self.steps]
        rows += [(f"type_ms/{name}", 0, t.self / 1e6) for name, t in self.by_type().items()]
        write_scalars(folder, rows)

    def _repr_html_(self) -> str:
        return render_html([self.table(), self.table("module"), self.table("step")], self)

    def _title(self) -> str:
        total = self.total
        forward, backward = total.forward / 1e6, total.backward / 1e6
        parts = [f"self time {forward:.3f} ms forward, {backward:.3f} ms backward"]
        steps, wall = self.ended, self.wall
        if wall:
            ops = sum(step.ops for step in self.counted)
            count = format_count(len(steps), "step")
            # The last operators may be in a step that has not ended.
            more = " and what followed" if len(self.counted) > len(steps) else ""
            parts.append(f"{ops / wall:.1%} of {wall / 1e6:.3f} ms in {count}{more}")
            rest = sum(step.rest for step in self.counted)
            parts.append(
                f"{rest / wall:.1%} between operators"
                if rest >= 0
                else f"those of {len(self.threads)} threads ran at once"
            )
            if waiting := self.waiting:
                parts.append(f"{waiting / wall:.1%} in collectives, waiting included")
            if len(steps) > 1:
                middle, last, spread = (t / 1e6 for t in quantiles(s.wall for s in steps))
                parts.append(f"a step: median {middle:.3f} ms, p95 {last:.3f}, spread {spread:.3f}")
            parts.append(self._describe_cost())
        left_out = len(self.steps) - len(self.counted)
        if left_out:
            parts.append(f"{format_count(left_out, 'step')} of warm-up left out")
        elif self.steps:
            parts.append("without warm-up")
        return "; ".join(part for part in [*parts, self.advice, *self.notes] if part)

    def _name_plain_steps(self) -> str:
        numbers = [str(step.number) for step in self.plain_steps]
        return f"Steps without the profiler: {', '.join(numbers)}" if numbers else ""

    def _describe_cost(self) -> str:
        tool = format_percent(sum(step.tool for step in self.counted), self.wall)
        if self.plain is None:
            return f"timing took {tool} and what the driver takes to call it, which is not known"
        middle, *_ = quantiles(step.wall for step in self.counted)
        share = format_percent(max(0, middle - self.plain), middle)
        numbers = ", ".join(str(step.number) for step in self.plain_steps)
        return (
            f"timing took {share}: a step takes {self.plain / 1e6:.3f} ms without it, "
            f"as steps {numbers} say"
        )

    def _with_apart(self, rows: list[tuple[object, ...]], after: int) -> list[tuple[object, ...]]:
        """Add the rows that complete the rows of operators to the time of the steps.

        Args:
            rows: The rows of operators.
            after: Number of columns after the share, not counting those of devices.
        """
        if not self.wall:
            return rows
        overlap = self.total.self - sum(step.ops for step in self.counted)
        rest = sum(step.rest for step in self.counted)
        apart = {
            "(all)": self.wall,
            # Operators of several threads may take longer together than the steps.
            "(between operators)" if rest >= 0 else "(threads at once)": rest,
            "(profiler)": sum(step.tool for step in self.counted),
            **self._driver_row(),
            # Operators of graphs run concurrently, so together they take less time.
            **({"(at the same time)": -overlap} if overlap else {}),
        }
        empty = ("",) * (after + len(self._device_columns()))
        found = [
            (name, *_ms(time), format_percent(time, self.wall), *empty)
            for name, time in apart.items()
        ]
        return found + rows

    def _driver_row(self) -> dict[str, int]:
        time = sum(step.driver for step in self.counted)
        return {DRIVER: time} if self.plain is not None else {}

    def _with_outside(self, sums: dict[str, Times]) -> dict[str, Times]:
        """Add the time between operators to the sum of those that are in no module."""
        if OUTSIDE in sums:
            sums[OUTSIDE].between = self.between.get("", 0)
        return sums

    def _device_columns(self) -> tuple[str, ...]:
        timed = ["device ms"] if self._is_on_device() else []
        return (*timed, *(["kernel ms"] if self.kernels else []))

    def _kernel_rows(self) -> list[tuple[object, ...]]:
        times: dict[tuple[str, str, str], int] = {}
        for kernel in self.kernels:
            op = "" if kernel.op is None else self.ops[kernel.op].name
            key = (kernel.name, op, kernel.device)
            times[key] = times.get(key, 0) + kernel.duration
        longest = sorted(times.items(), key=lambda item: -item[1])
        return [(*key, time / 1e6) for key, time in longest]


#: Fields of operators, steps and sums that are times.
_TIMES = (
    *(
        "total",
        "self",
        "typical",
        "first",
        "shortest",
        "longest",
        "median",
        "p95",
        "spread",
        "plain",
    ),
    *("device", "device_total", "device_self", "kernel_time", "forward", "backward"),
    *("wall", "ops", "tool", "driver", "between", "rest", "graph_busy", "graph_total"),
)
#: Fields that are not in the JSON.
_APART = ("spans", "kernels", "others")


def _on_device(columns: Sequence[str], time: int, kernel_time: int) -> list[float]:
    given = {"device ms": time, "kernel ms": kernel_time}
    return [given[column] / 1e6 for column in columns]


def _mark(step: StepTime) -> str:
    return " (warm-up)" if step.warm_up else " (without the profiler)"


def _cells_of(step: StepTime) -> tuple[object, ...]:
    share = format_percent(step.ops, step.wall)
    return (*_ms(step.ops), share, *_ms(step.tool, step.driver, step.rest))


def _ms(*times: float) -> tuple[float, ...]:
    return tuple(round(time / 1e6, 4) for time in times)
