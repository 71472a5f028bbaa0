"""Detection of the operator that produces the first NaN or infinity."""

from amanda_tools.nonfinite.result import Fault, NonFiniteResult, Origin
from amanda_tools.nonfinite.tool import NonFinite, NonFiniteError

__all__ = ["Fault", "NonFinite", "NonFiniteError", "NonFiniteResult", "Origin"]
