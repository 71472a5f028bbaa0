"""The driver's layers: imports go down, also those in functions and for annotations."""

from __future__ import annotations

from pathlib import Path

from amanda_core.testing.checks.layers import Layers

LAYERS: list[str | tuple[str, ...]] = [
    "plugin",
    ("attachment", "model_files"),
    ("interception", "execution"),
    ("identity", "facts"),
    ("graphs", "onnxruntime_internals", "staging"),
    "vocabulary",
    "__init__",
]


def test_imports_go_down_the_layers() -> None:
    package = Path(__file__).parents[1] / "src/amanda_driver_onnxruntime"
    assert Layers(package, LAYERS).problems() == []
