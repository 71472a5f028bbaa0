"""The driver's layers: imports go down, also those in functions and for annotations."""

from __future__ import annotations

from pathlib import Path

from amanda_core.testing.checks.layers import Layers

LAYERS: list[str | tuple[str, ...]] = [
    ("plugin", "self_test"),
    "attachment",
    "oracle",
    ("interception", "execution"),
    ("gradients", "identity"),
    "facts",
    "mindspore_internals",
    "vocabulary",
    "__init__",
]


def test_imports_go_down_the_layers() -> None:
    package = Path(__file__).parents[1] / "src/amanda_driver_mindspore"
    assert Layers(package, LAYERS).problems() == []
