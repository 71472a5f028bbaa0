"""Comparison of two dumps operator by operator, also across frameworks."""

from amanda_tools.diff.comparison import Compared, DiffResult, compare
from amanda_tools.diff.numbers import Tolerance

__all__ = ["Compared", "DiffResult", "Tolerance", "compare"]
