"""The driver uses only public names of the core, so that others can copy it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import amanda_driver_tinytape

SOURCES = sorted(
    [
        *Path(amanda_driver_tinytape.__path__[0]).glob("*.py"),
        *Path(__file__).parent.glob("*.py"),
    ]
)
PUBLIC = (
    "amanda",
    "amanda_core",
    "amanda_core.driver_kit",
    "amanda_core.errors",
    "amanda_core.interface",
    "amanda_core.testing",
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_only_public_names_are_used(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.startswith("amanda")]
            assert set(ours) <= {*PUBLIC, "amanda_driver_tinytape"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amanda"):
            if (node.module or "").startswith("amanda_driver_tinytape"):
                continue
            assert node.module in PUBLIC
            public = importlib.import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= set(public)
        elif isinstance(node, ast.Attribute):
            # A private attribute of somebody else's; Python's frames have no other way.
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            assert not private or is_own or node.attr == "_getframe", ast.unparse(node)


def test_all_files_are_looked_at() -> None:
    assert {"attachment.py", "plugin.py", "vocabulary.py"} <= {path.name for path in SOURCES}
