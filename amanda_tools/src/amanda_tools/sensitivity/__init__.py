"""Ranking of operators by the damage that quantizing or pruning each of them does."""

from amanda_tools.sensitivity.result import SensitiveOp, SensitivityResult
from amanda_tools.sensitivity.tool import Sensitivity

__all__ = ["SensitiveOp", "Sensitivity", "SensitivityResult"]
