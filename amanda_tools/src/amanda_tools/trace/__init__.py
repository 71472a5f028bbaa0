"""Tracing of operators: `Trace` records which ones run, and in which order."""

from __future__ import annotations

from amanda_tools.trace.result import TracedOp, TraceResult
from amanda_tools.trace.tool import Trace

__all__ = ["Trace", "TraceResult", "TracedOp"]
