"""Summary of models: `Summary` lists modules with their outputs, parameters and costs."""

from __future__ import annotations

from amanda_tools.summary.result import ModuleSummary, SummaryResult
from amanda_tools.summary.tool import Summary

__all__ = ["ModuleSummary", "Summary", "SummaryResult"]
