"""The driver's layers: imports go down, also those in functions and for annotations."""

from __future__ import annotations

from pathlib import Path

from amanda_core.testing.checks.layers import Layers

LAYERS: list[str | tuple[str, ...]] = [
    ("plugin", "self_test"),
    "attachment",
    ("facts", "execution", "module_calls"),
    "gradients",
    "routines",
    "value_primitives",
    "interception",
    "stacked_layers",
    "identity",
    "arrays",
    "trace_keys",
    "jax_internals",
    ("vocabulary", "contractions"),
    "__init__",
]


def test_imports_go_down_the_layers() -> None:
    package = Path(__file__).parents[1] / "src/amanda_driver_jax"
    assert Layers(package, LAYERS).problems() == []
