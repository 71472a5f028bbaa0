"""Imports inside the driver go one way, from the plugin down to what is known of PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from amanda_core.testing.checks.layers import Layers

pytestmark = pytest.mark.one_interceptor

LAYERS: list[str | tuple[str, ...]] = [
    ("plugin", "self_test"),
    "__init__",
    "doctor",
    "attachment",
    "compiled",
    "interception",
    "execution",
    "communication",
    "gradients",
    "identity",
    "threads",
    "operators",
    "facts",
    ("exported_numbers", "groups", "repeating"),
    "torch_internals",
    ("extensions", "vocabulary", "contractions", "placements"),
]


def test_imports_go_down() -> None:
    layers = Layers(Path(__file__).parents[1] / "src/amanda_driver_torch", LAYERS)
    assert len(layers.imports) > 100
    assert layers.problems() == []
