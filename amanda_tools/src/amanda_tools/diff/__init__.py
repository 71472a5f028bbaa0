"""Comparison of two runs operator by operator: their fingerprints, or their dumps."""

from amanda_tools.diff.compared import Compared
from amanda_tools.diff.comparison import DiffResult, compare
from amanda_tools.diff.fingerprints import (
    Divergence,
    FingerprintDiff,
    compare_fingerprints,
    is_fingerprint,
)
from amanda_tools.diff.numbers import Tolerance
from amanda_tools.diff.saving import save_arrays, save_inspected

__all__ = [
    "Compared",
    "DiffResult",
    "Divergence",
    "FingerprintDiff",
    "Tolerance",
    "compare",
    "compare_fingerprints",
    "is_fingerprint",
    "save_arrays",
    "save_inspected",
]
