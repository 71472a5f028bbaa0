"""The layers of the driver: imports go down, also those in functions and for annotations."""

from __future__ import annotations

from pathlib import Path

from amanda_core.testing.layers import Layers

LAYERS: list[str | tuple[str, ...]] = [
    "plugin",
    "attachment",
    ("eager", "hybrid"),
    ("gradients", "routines", "identity"),
    "custom_nodes",
    "facts",
    "_mxnet_internals",
    "vocabulary",
    "__init__",
]


def test_imports_go_down_the_layers() -> None:
    package = Path(__file__).parents[1] / "src/amanda_driver_mxnet"
    assert Layers(package, LAYERS).problems() == []
