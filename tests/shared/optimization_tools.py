"""The tools that change what a model computes, made once for every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda_tools.faults import InjectFaults
from amanda_tools.prune import Prune, PruneNM
from amanda_tools.quantize import Quantize

__all__ = ["TOOLS"]

TOOLS: dict[str, Callable[[], Any]] = {
    "inject_faults": lambda: InjectFaults(["relu"], model="zero", rate=1.0),
    "prune": lambda: Prune(0.6),
    "prune_nm": lambda: PruneNM(2, 4),
    "quantize": lambda: Quantize("dynamic", "int4", "none"),
}
