"""All tools that only look, with the options under which they look at most, and some that edit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from amanda_tools.capture import Capture
from amanda_tools.dump import Dump
from amanda_tools.effective_path import EffectivePath
from amanda_tools.faults import InjectFaults
from amanda_tools.fingerprint import Fingerprint
from amanda_tools.flops import Flops
from amanda_tools.gating import PruneAttention, PruneChannels, PrunePositions
from amanda_tools.graph import GraphTracing
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.prune import Prune, PruneNM, PruneTiles
from amanda_tools.quantize import Quantize
from amanda_tools.rematerialize import Rematerialize
from amanda_tools.replicas import Replicas
from amanda_tools.rewriting import Rewrite
from amanda_tools.sensitivity import Sensitivity
from amanda_tools.sparsity import Sparsity
from amanda_tools.steer import Steer
from amanda_tools.summary import Summary
from amanda_tools.trace import Trace

__all__ = ["EDITING", "TOOLS", "checked"]

TOOLS: dict[str, Callable[[], Any]] = {
    "capture": lambda: Capture(["*"], ["*"], ["inputs", "outputs"], everything=True),
    "dump": lambda: Dump(values=["inputs", "weights", "outputs", "gradients"], everything=True),
    "effective_path": EffectivePath,
    "effective_path FwAB": lambda: EffectivePath(variant="FwAB"),
    "fingerprint": lambda: Fingerprint(norms=True),
    "flops": lambda: Flops(include=["matmul", "norm", "elementwise"], everything=True),
    "graph": lambda: GraphTracing(everything=True),
    "latency": lambda: Latency(kernels=True),
    "memory": Memory,
    "nonfinite": lambda: NonFinite(everything=True, norms=True),
    "replicas": Replicas,
    "rewrite": lambda: Rewrite(rules=["conv_bn", "sdpa"]),
    "sensitivity": Sensitivity,
    "sparsity": lambda: Sparsity(gradients=True, everything=True),
    "summary": Summary,
    "trace": lambda: Trace(everything=True),
}
#: Tools that compute new values, with options under which these are the same as before. A driver
#: may refuse them where it refuses edits.
EDITING: dict[str, Callable[[], Any]] = {
    "inject_faults": lambda: InjectFaults(model="scale", amount=1.0, rate=0.1),
    "prune": lambda: Prune(0.0),
    "prune_attention": lambda: PruneAttention(layers=[]),
    "prune_channels": lambda: PruneChannels(layers=[]),
    "prune_nm": lambda: PruneNM(4, 4),
    "prune_positions": lambda: PrunePositions(layers=[]),
    "prune_tiles": lambda: PruneTiles(0.0),
    "quantize": lambda: Quantize(weights="none", calibration=10**9),
    "rematerialize": Rematerialize,
    "rematerialize everything": lambda: Rematerialize(0, strict=False),
    "steer": lambda: Steer("scale", factor=1.0, ops=["linear", "matmul", "relu"]),
    "steer weights": lambda: Steer(
        "scale", factor=1.0, ops=["linear", "matmul"], value="inputs", operand=1
    ),
}


def checked(name: str, tool: Any) -> None:
    """Check that a tool has a result in all forms."""
    result = tool.result()
    assert json.loads(result.to_json())["format"] == f"amanda.{name.split()[0]}/1"
    assert result.table().title
    assert result._repr_html_()
