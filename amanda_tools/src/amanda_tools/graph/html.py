"""Graphs as one HTML page that needs no network: modules, search, and details of each operator.

The styles and scripts are in ``page/``. Text from the program enters the page only as data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda_tools.graph import files
from amanda_tools.graph.model import Graph
from amanda_tools.page.composition import Parts, compose, part

__all__ = ["page"]


def page(graphs: Sequence[Graph]) -> str:
    """Return the page for these graphs."""
    style, script, body = (part(__package__, f"page/page.{name}") for name in ("css", "js", "html"))
    data = {"graphs": [_data(graph) for graph in graphs]}
    return compose("Graph", body, Parts((style,), (script,)), data)


def _data(graph: Graph) -> dict[str, Any]:
    data = files.to_json(graph)
    for node in data["nodes"]:
        if "id" in node:
            node["id"] = str(node["id"])  # Too large for JavaScript's numbers.
    return data
