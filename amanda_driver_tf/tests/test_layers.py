"""The layers of the driver: imports go down, also those in functions and for annotations."""

from __future__ import annotations

from pathlib import Path

from amanda_core.testing.checks.layers import Layers

LAYERS: list[str | tuple[str, ...]] = [
    ("__init__", "plugin"),
    ("attachment", "remaining_objects", "vocabulary", "self_test"),
    ("interception", "facts"),
    ("execution", "execution.eager", "execution.functions", "execution.sessions"),
    "rewriting",
    ("gradients", "gradients.eager", "gradients.graphs"),
    "insertion",
    "graphs",
    "identity",
    "operators",
    "threads",
    "interceptor_choice",
    ("tensorflow_internals", "contractions"),
]


def test_imports_go_down_the_layers() -> None:
    package = Path(__file__).parents[1] / "src/amanda_driver_tf"
    assert Layers(package, LAYERS).problems() == []
