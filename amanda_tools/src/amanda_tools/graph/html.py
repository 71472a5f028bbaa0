"""Graphs as one page that needs no network: modules, search, and the details of each operator.

Owns the page's making; what it looks like and does stands in ``page/``. What comes from the
program gets into it as data alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from amanda_tools.graph import files
from amanda_tools.graph.model import Graph

__all__ = ["page"]


def page(graphs: Sequence[Graph]) -> str:
    """The page."""
    parts = {name: _part(f"page.{name}") for name in ("html", "css", "js")}
    return Template(parts["html"]).substitute(
        style=parts["css"],
        style_hash=_hash(parts["css"]),
        script=parts["js"],
        script_hash=_hash(parts["js"]),
        data=_embedded([_data(graph) for graph in graphs]),
    )


def _part(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return what a Content-Security-Policy allows a script or style by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _data(graph: Graph) -> dict[str, Any]:
    data = files.to_json(graph)
    for node in data["nodes"]:
        if "id" in node:
            node["id"] = str(node["id"])  # Longer than a number of JavaScript's.
    return data


def _embedded(data: Any) -> str:
    """JSON that can stand in a page: nothing in it ends the element or begins another."""
    text = json.dumps(data, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
