"""FLOPs profiler: count the multiply-accumulates of a program."""

from amanda_tools.flops.result import CountedOp, FlopsResult, Sum
from amanda_tools.flops.tool import Flops

__all__ = ["CountedOp", "Flops", "FlopsResult", "Sum"]
