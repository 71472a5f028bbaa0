"""The instrumentation points as globals, which are read at every operator.

Reading a member of an enumeration takes ten times as long.
"""

from __future__ import annotations

from amanda_core import IPoint

__all__ = ["AFTER_BACKWARD", "AFTER_FORWARD", "BEFORE_BACKWARD", "BEFORE_FORWARD"]

BEFORE_FORWARD, AFTER_FORWARD, BEFORE_BACKWARD, AFTER_BACKWARD = IPoint
