"""Graphs as a trace file: when each operator ran, and which backward operator belongs to it.

Matches forward and backward executions. `amanda_tools.kit.output.chrome` defines the format, and a
profiler provides the times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from amanda_core.errors import ResultError
from amanda_tools.graph.model import Graph, Op
from amanda_tools.kit.output.chrome import Span, TraceFile
from amanda_tools.kit.tensors.types import text_of

__all__ = ["write"]


def write(graphs: Iterable[Graph], spans: Sequence[Span], path: Path) -> Path:
    """Write a trace file with an event for each execution and arrows from forward to backward.

    Args:
        graphs: The graphs.
        spans: Executions timed by `amanda_tools.latency`. Those of operators that are not in the
            graphs are ignored.
        path: The file.

    Returns:
        The file that was written; see `amanda_tools.kit.output.chrome.TraceFile.write`.

    Raises:
        ResultError: None of the spans belongs to an operator of the graphs.
    """
    ops = {
        (op.id, op.is_backward, op.name): (graph, op)
        for graph in graphs
        for op in (*graph.ops, *graph.backward_ops)
    }
    found = [(key, span) for span in spans if (key := _key_of(span)) in ops]
    if not found:
        raise ResultError(
            "The graph has no times, which a trace file is made of",
            fix="Trace with formats=['trace'], or give the result those of a profiler: "
            "result.spans = latency.result().spans",
        )
    trace = TraceFile("amanda graph")
    timed: list[tuple[Graph, Op, Span]] = [(*ops[key], span) for key, span in found]
    tracks = trace.add_spans([_shown(op, span) for _, op, span in timed])
    for begin, end in _arrows(timed):
        name = "forward to backward"
        trace.add_flow(
            name, (tracks[begin], timed[begin][2].start), (tracks[end], timed[end][2].start)
        )
    return trace.write(path)


def _key_of(span: Span) -> tuple[object, bool, str]:
    return span.arguments.get("id"), span.category == "backward", span.name


def _shown(op: Op, span: Span) -> Span:
    shapes = " ".join(text for text in map(text_of, op.outputs) if text)
    arguments = {**span.arguments, "node": op.index, "outputs": shapes}
    return Span(span.track, span.name, span.start, span.end, span.category, arguments)


def _arrows(timed: Sequence[tuple[Graph, Op, Span]]) -> Iterable[tuple[int, int]]:
    """Yield the numbers of forward and backward executions that belong together.

    Backward operators process the last forward execution first, and each execution once.
    """
    order = sorted(range(len(timed)), key=lambda number: timed[number][2].start)
    #: Graph and index of a forward operator -> its executions.
    ran: dict[tuple[Graph, int], list[int]] = {}
    #: Graph and index of a backward operator -> the forward executions it has processed.
    undone: dict[tuple[Graph, int], set[int]] = {}
    for number in order:
        graph, op, span = timed[number]
        if not op.is_backward:
            ran.setdefault((graph, op.index), []).append(number)
            continue
        forward = graph.forward_of(op)
        if forward is None:
            continue
        known = undone.setdefault((graph, op.index), set())
        for before in reversed(ran.get((graph, forward.index), [])):
            if before not in known and timed[before][2].end <= span.start:
                known.add(before)
                yield before, number
                break
