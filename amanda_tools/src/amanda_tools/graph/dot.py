"""Graphs in DOT, the language of Graphviz, and as pictures drawn by its program ``dot``."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from amanda_core.results import printable
from amanda_tools.graph.model import Graph, Module, Op
from amanda_tools.kit.output.extras import program
from amanda_tools.kit.output.folders import write_text
from amanda_tools.kit.tensors.types import text_of

__all__ = ["dot", "draw", "write"]

_COLOURS = {False: "#dce8fd", True: "#fbe3cf"}


def write(graph: Graph, path: Path) -> None:
    """Write a graph as a DOT file."""
    write_text(path, dot(graph))


def draw(graph: Graph, path: Path) -> None:
    """Write a graph as an SVG file.

    Raises:
        MissingExtraError: The program ``dot`` is not installed.
        subprocess.SubprocessError: ``dot`` failed or took too long.
    """
    command = [program("dot", "Graphviz"), "-Tsvg", "-o", str(path)]
    text = dot(graph).encode()
    subprocess.run(command, input=text, check=True, capture_output=True, timeout=_PATIENCE)


#: Maximum number of seconds that drawing may take.
_PATIENCE = 600


def dot(graph: Graph) -> str:
    """Return a graph in DOT. Modules are boxes around their operators; backward operators are
    shaded.
    """
    lines = ["digraph {", f"label={_quoted(graph.namespace)};"]
    lines += ["node [shape=box, style=filled, fillcolor=white, fontname=Helvetica];"]
    lines += _box(graph.module_tree())
    for source in graph.sources:
        label = f"{source.kind}\n{source.name}\n{source.tensor or ''}"
        lines.append(f"n{source.index} [label={_quoted(label)}, style=dashed];")
    for edge in graph.edges:
        facts = [f"label={_quoted(edge.output)}"] if edge.output else []
        if edge.kind == "alias" or edge.back:
            facts.append("style=dashed" if edge.back else "style=dotted")
        if edge.back:
            facts.append("constraint=false")
        lines.append(f"n{edge.producer} -> n{edge.consumer} [{', '.join(facts)}];")
    return "\n".join([*lines, "}", ""])


def _box(module: Module) -> Iterator[str]:
    if module.path:
        yield f"subgraph {_quoted('cluster_' + module.path)} {{ label={_quoted(module.name)};"
    for op in module.ops:
        colour = _COLOURS[op.is_backward]
        yield f"n{op.index} [label={_quoted(_label(op))}, fillcolor={_quoted(colour)}];"
    for child in module.children.values():
        yield from _box(child)
    if module.path:
        yield "}"


def _label(op: Op) -> str:
    shapes = " ".join(text for text in map(text_of, op.outputs) if text)
    return f"{op.kind}\n{op.name}\n{shapes}"


def _quoted(value: object) -> str:
    r"""Return a DOT string. A line break becomes ``\n``, and nothing else is an escape."""
    lines = (printable(line) for line in str(value).split("\n"))
    text = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'"{text}"'
