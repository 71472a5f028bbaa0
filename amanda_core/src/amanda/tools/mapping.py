"""The paper's path of the mapping tool: names only."""

from __future__ import annotations

from amanda_tools.mapping import MappingTool

__all__ = ["MappingTool"]
