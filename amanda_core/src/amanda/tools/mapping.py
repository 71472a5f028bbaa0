"""The paper's path of the mapping tool: names only."""

from __future__ import annotations

from amanda_tools.kit.mapping import MappingTool

__all__ = ["MappingTool"]
