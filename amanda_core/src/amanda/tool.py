"""The spelling `amanda.tool.apply` of the tutorial: names only, no logic."""

from __future__ import annotations

from amanda_core.activation import apply
from amanda_core.tool import Tool

__all__ = ["Tool", "apply"]
