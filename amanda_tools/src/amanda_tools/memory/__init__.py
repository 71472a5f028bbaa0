"""Memory profiler: what operators allocate and free."""

from amanda_tools.memory.result import AllocatingOp, MemoryResult, Moment, StepMemory
from amanda_tools.memory.tool import Memory

__all__ = ["AllocatingOp", "Memory", "MemoryResult", "Moment", "StepMemory"]
