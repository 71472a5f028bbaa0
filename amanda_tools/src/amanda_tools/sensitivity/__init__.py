"""Ranking of operators by the damage that quantizing or pruning each of them does."""

from amanda_tools.sensitivity.measure import MeasuredOp, MeasuredResult, measure_damage
from amanda_tools.sensitivity.result import SensitiveOp, SensitivityResult
from amanda_tools.sensitivity.tool import Sensitivity

__all__ = [
    "MeasuredOp",
    "MeasuredResult",
    "SensitiveOp",
    "Sensitivity",
    "SensitivityResult",
    "measure_damage",
]
