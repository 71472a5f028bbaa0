"""The driver's layers and size: imports go down, also those in functions and for annotations."""

from __future__ import annotations

from pathlib import Path

from amanda_core.testing.layers import Layers
from amanda_core.testing.source_lines import lines_of_package

PACKAGE = Path(__file__).parents[1] / "src/amanda_driver_jax"

LAYERS: list[str | tuple[str, ...]] = [
    "plugin",
    "_attachment",
    "_modules",
    ("facts", "_execution"),
    "_routines",
    "_interception",
    "_call_sites",
    "_trace_keys",
    "_values",
    "_jax_internals",
    "vocabulary",
    "__init__",
]


def test_imports_go_down_the_layers() -> None:
    assert Layers(PACKAGE, LAYERS).problems() == []


def test_the_driver_stays_small() -> None:
    # What several drivers need belongs into the core.
    assert lines_of_package(PACKAGE) <= 900
