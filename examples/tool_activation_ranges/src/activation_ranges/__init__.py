"""Value ranges of every op of a model: minimum, maximum, percentiles, histogram, NaN, infinities.

A tool for Amanda; it runs on every framework that a driver is installed for, and imports none.
`tool` watches, `arrays` and `sketch` reduce, `result` and `plots` tell.
"""

from __future__ import annotations

from activation_ranges.result import Range, Ranges
from activation_ranges.tool import ActivationRanges

__all__ = ["ActivationRanges", "Range", "Ranges"]
