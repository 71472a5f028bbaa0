"""The layers of the driver: imports go down, also those in functions and for annotations."""

from __future__ import annotations

from pathlib import Path

from amanda_core.testing.layers import Layers

LAYERS: list[str | tuple[str, ...]] = [
    ("__init__", "plugin"),
    ("_attachment", "_remnants", "vocabulary", "self_test"),
    ("_eager", "_functions", "_sessions", "_facts"),
    "_rewriting",
    "_gradients",
    "_insertion",
    "_graphs",
    "_shared",
    "_tensorflow_internals",
    "_interceptor_choice",
    "_extension",
    "_versions",
]


def test_imports_go_down_the_layers() -> None:
    package = Path(__file__).parents[1] / "src/amanda_driver_tf"
    assert Layers(package, LAYERS).problems() == []
