"""Value ranges of every op of a model: minimum, maximum, percentiles, histogram, NaN, infinities.

A tool for Amanda. It runs on every framework with an installed driver and imports none. `tool`
collects values, `arrays` and `sketch` reduce them, `result` and `plots` present them.
"""

from __future__ import annotations

from activation_ranges.result import Range, Ranges
from activation_ranges.tool import ActivationRanges

__all__ = ["ActivationRanges", "Range", "Ranges"]
