"""Graphs as one HTML page that needs no network: modules, search, and details of each operator.

Fills the templates in ``page/``. Text from the program enters the page only as data.
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
    """Return the page for these graphs."""
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
    """Return the hash that allows a script or style in a Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _data(graph: Graph) -> dict[str, Any]:
    data = files.to_json(graph)
    for node in data["nodes"]:
        if "id" in node:
            node["id"] = str(node["id"])  # Too large for JavaScript's numbers.
    return data


def _embedded(data: Any) -> str:
    """Return JSON that is safe inside a page: it cannot end its element or begin another."""
    text = json.dumps(data, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
