"""Changes of chosen values: vectors added, replaced or projected out, heads and neurons ablated."""

from amanda_tools.steer.result import SteeredOp, SteerResult
from amanda_tools.steer.tool import Steer

__all__ = ["Steer", "SteerResult", "SteeredOp"]
