"""The spelling `amanda.tool.apply` of the tutorial: names only, no logic."""

from __future__ import annotations

from amanda_core.engine.activation import apply
from amanda_core.engine.tool import Tool

__all__ = ["Tool", "apply"]
