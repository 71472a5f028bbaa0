"""The layers of the tools: the kit, the tools beside one another, the front ends."""

from __future__ import annotations

from pathlib import Path

import amanda_tools
from amanda_core.testing.checks.layers import Layers

FRONT_ENDS = ("commands", "notebook", "overview", "report", "training")
#: The tools: those that use others stand above them.
TOOLS: list[tuple[str, ...]] = [
    ("replay", "replicas"),
    (
        *("capture", "diff", "effective_path", "faults", "gating", "prune", "rematerialize"),
        *("rewriting", "sensitivity", "sparsity", "steer", "summary", "trace"),
    ),
    ("dump", "fingerprint", "flops", "graph", "memory", "nonfinite", "quantize"),
    ("latency",),
]
KIT: list[str | tuple[str, ...]] = [
    "kit",
    ("kit.sequences", "kit.weights"),
    ("kit.mapping", "kit.operators", "kit.page"),
    ("kit.output", "kit.tensors"),
]
#: Which tools use which others, and for what.
BORROWED = {
    ("capture", "dump"): "the files",
    ("diff", "dump"): "what it compares",
    ("diff", "fingerprint"): "what it compares",
    ("effective_path", "graph"): "the values between operators",
    ("graph", "latency"): "the times that it shows",
    ("prune", "flops"): "multiply-accumulates that are left",
    ("rematerialize", "memory"): "the ledger of live buffers",
    ("replay", "diff"): "how far values are apart",
    ("replay", "dump"): "what it executes again",
    ("replicas", "diff"): "which values correspond",
    ("replicas", "fingerprint"): "its rows, to which it adds",
    ("rewriting", "graph"): "the graph in which it searches",
    ("sensitivity", "quantize"): "the formats and operands that it disturbs",
    ("sparsity", "flops"): "effective multiply-accumulates",
    ("summary", "flops"): "the cost of operators",
}
LAYERS = Layers(Path(amanda_tools.__path__[0]), [FRONT_ENDS, *TOOLS, *KIT, "__init__"])


def test_imports_go_down_the_layers() -> None:
    assert LAYERS.problems() == []


def test_tools_use_only_the_kit_and_the_tools_that_are_named() -> None:
    tools = {name for row in TOOLS for name in row}
    pairs = {
        (one.importer.partition(".")[0], one.imported.partition(".")[0]) for one in LAYERS.imports
    }
    found = {(by, of) for by, of in pairs if by in tools and of in tools and by != of}
    assert found == set(BORROWED)


def test_beside_the_kit_there_are_only_tools_and_front_ends() -> None:
    names = {name.partition(".")[0] for name in LAYERS.modules} - {"__init__"}
    assert names == {"kit", *FRONT_ENDS, *(name for row in TOOLS for name in row)}
