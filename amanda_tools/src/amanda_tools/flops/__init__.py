"""How many multiply-accumulates a program computes."""

from amanda_tools.flops.result import CountedOp, FlopsResult, Sum
from amanda_tools.flops.tool import Flops

__all__ = ["CountedOp", "Flops", "FlopsResult", "Sum"]
