"""The layers of the tools: what they share lies below, and no tool knows one that uses it."""

from __future__ import annotations

from pathlib import Path

import amanda_tools
from amanda_core.testing.layers import Layers

LAYERS: list[str | tuple[str, ...]] = [
    ("commands", "notebook", "report", "training"),
    (
        *("capture", "diff", "effective_path", "faults", "gating", "prune", "rematerialize"),
        *("rewriting", "sensitivity", "sparsity", "steer"),
    ),
    "quantize",
    "weight_tool",
    "weight_files",
    ("dump", "flops", "graph", "memory", "nonfinite", "sequences", "trace"),
    "latency",
    ("learned_parameters", "mapping", "weight_copies", "weight_coverage", "weight_writes"),
    ("operators", "page"),
    ("output", "tensors"),
    "__init__",
]


def test_imports_go_down_the_layers() -> None:
    assert Layers(Path(amanda_tools.__path__[0]), LAYERS).problems() == []
