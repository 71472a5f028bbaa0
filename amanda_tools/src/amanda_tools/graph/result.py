"""Result of `GraphTracing`: its tables, and the files that it is written to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from amanda_core.results import OpFigures, Table
from amanda_tools.graph import dot, files, html, onnx_model, picture, tensorboard_events, timeline
from amanda_tools.graph.model import Graph, Op
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.chrome import Span
from amanda_tools.kit.output.extras import program, require
from amanda_tools.kit.output.folders import create_folder, write_text
from amanda_tools.kit.output.rendering import (
    dataframe,
    describe_overhead,
    format_count,
    render_html,
    render_json,
)

__all__ = ["FORMATS", "Format", "GraphResult", "check"]

Format = Literal["json", "html", "dot", "svg", "tensorboard", "onnx", "onnx_backward", "trace"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass
class GraphResult:
    """Result of `GraphTracing`.

    Attributes:
        graphs: One graph for each namespace.
        formats: The formats that `write` creates; JSON comes from `to_json`.
        tool_seconds: The part of `wall_seconds` spent in the tool, without what the driver adds to
            call it.
        wall_seconds: Time from the first operator that the tool looked at to the last.
        spans: Executions timed by a profiler; only the format ``trace`` uses them.
        left_out: Number of executions beyond the profiler's limit, which are not in `spans`.
        notes: What was not traced, and why.
    """

    graphs: list[Graph] = field(default_factory=list)
    formats: Sequence[Format] = ("json", "html")
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    spans: Sequence[Span] = field(default=(), repr=False)
    left_out: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        """Return the graph with the most nodes, or an empty graph if there is none."""
        return max(self.graphs, key=lambda graph: len(graph.nodes), default=Graph(""))

    def table(self) -> Table:
        """Return a table with one row for each operator type."""
        rows = sorted(
            (row for graph in self.graphs for row in _rows(graph)), key=lambda row: -row[1]
        )
        columns = ("operator", "count", "executions", "backward operators", "namespace")
        return Table(self._title(), columns, rows)

    def to_json(self) -> str:
        """Return the whole result as JSON that follows ``docs/tools/graph.schema.json``."""
        return render_json(
            {
                "format": files.FORMAT,
                "graphs": [files.to_json(graph) for graph in self.graphs],
                "tool_seconds": self.tool_seconds,
                "wall_seconds": self.wall_seconds,
                "notes": self.notes,
                "charts": self._charts(),
            },
            levels=4,
        )

    def _charts(self) -> list[charts.Chart]:
        graph = self.graph
        if not graph.nodes:
            return []
        return [
            charts.figures(
                charts.figure("operators", len(list(graph.ops))),
                charts.figure("backward operators", len(list(graph.backward_ops))),
                charts.figure("values between them", len(graph.edges)),
            ),
            charts.graph("The network", "graphs"),
        ]

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one row for each operator; needs pandas.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return dataframe(Op, [op for g in self.graphs for op in (*g.ops, *g.backward_ops)])

    def take_op_figures(self, figures: Mapping[str, Sequence[OpFigures]]) -> None:
        """Add the figures of other tools' results, by the name of the tool, to the operators.

        `amanda run` calls this. A program calls `amanda_core.results.share`.
        """
        for graph in self.graphs:
            for tool, found in figures.items():
                graph.annotate(found, tool)

    def write(self, folder: Path | str) -> list[Path]:
        """Write the requested formats except JSON.

        Args:
            folder: The folder; it is created if necessary.

        Returns:
            The files.

        Raises:
            MissingExtraError: A format needs a package or program that is not installed.
            ResultError: A trace file was requested, but there are no times.
        """
        folder = create_folder(folder)
        found: list[Path] = []
        if "html" in self.formats:
            found.append(folder / "graph.html")
            write_text(found[-1], html.page(self.graphs))
        if "trace" in self.formats:
            found.append(timeline.write(self.graphs, self.spans, folder / "graph-trace.json"))
        for number, graph in enumerate(self.graphs):
            for form, (ending, writer) in _WRITERS.items():
                if form in self.formats:
                    path = folder / (f"graph-{number}{ending}" if number else f"graph{ending}")
                    writer(graph, path)
                    found += sorted(path.iterdir()) if path.is_dir() else [path]
        return found

    def _repr_html_(self) -> str:
        pictures = [picture.draw(graph) for graph in self.graphs]
        drawn = "".join(f"<figure>{one}</figure>" for one in pictures if one)
        return drawn + render_html([self.table()])

    def _title(self) -> str:
        graphs = self.graphs
        backward = sum(len(graph.backward_ops) for graph in graphs)
        parts = [
            f"{format_count(sum(len(graph.ops) for graph in graphs), 'operator')}, "
            f"{format_count(backward, 'backward operator')}, "
            f"{format_count(sum(len(graph.edges) for graph in graphs), 'value')} between them"
        ]
        if self.left_out:
            parts.append(f"{format_count(self.left_out, 'execution')} not in the trace file")
        parts += describe_overhead("tracing", self.tool_seconds, self.wall_seconds)
        return "; ".join([*parts, *self.notes])


#: Format with a file for each graph -> ending of the file's name, and the function that writes it.
_WRITERS: dict[Format, tuple[str, Callable[[Graph, Path], None]]] = {
    "dot": (".dot", dot.write),
    "svg": (".svg", dot.draw),
    "tensorboard": ("-tensorboard", tensorboard_events.write),
    "onnx": (".onnx", onnx_model.write),
    "onnx_backward": ("-backward.onnx", onnx_model.write_both),
}


def check(formats: Sequence[Format]) -> None:
    """Check before a long run that the formats can be written after it.

    Raises:
        MissingExtraError: A format needs a package or program that is not installed.
        ValueError: A format is unknown.
    """
    for form in formats:
        if form not in FORMATS:
            raise ValueError(f"formats must be of {', '.join(FORMATS)}, not {form!r}")
    if "svg" in formats:
        program("dot", "Graphviz")
    if "tensorboard" in formats:
        require("tensorboard", "tensorboard")
    if "onnx" in formats or "onnx_backward" in formats:
        require("onnx", "onnx")


def _rows(graph: Graph) -> list[tuple[str, int, int | str, int, str]]:
    counts: Counter[str] = Counter()
    executions: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for op in graph.ops:
        counts[op.kind] += 1
        executions[op.kind] += op.executions or 0
        backward[op.kind] += len(graph.backward_of(op))
    seen = any(op.executions is not None for op in graph.ops)
    found: list[tuple[str, int, int | str, int, str]] = [
        (kind, count, executions[kind] if seen else "", backward[kind], graph.namespace)
        for kind, count in counts.items()
    ]
    alone = sum(graph.forward_of(op) is None for op in graph.backward_ops)
    if alone:
        found.append(("(no forward operator)", 0, "", alone, graph.namespace))
    return found
