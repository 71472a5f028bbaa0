"""The state of a thread that drivers read at every operator, in native code without a call.

Owns the layout of its buffer: five 64-bit integers. `include/amanda_switches.h` has the same layout
for C. A native driver ships a copy of that header and checks the version at the buffer's start.
"""

from __future__ import annotations

from array import array

__all__ = [
    "CACHING",
    "ENABLED",
    "EPOCH",
    "LAYOUT_VERSION",
    "ROUTINE_DEPTH",
    "VERSION",
    "new_switches",
]

#: The layout that this module describes.
LAYOUT_VERSION = 1
# Positions in the buffer. The epoch is that of the session that runs in the thread, 0 before the
# first one; the depth is more than 0 while a routine of a tool runs there.
VERSION, ENABLED, CACHING, EPOCH, ROUTINE_DEPTH = range(5)


def new_switches() -> array[int]:
    """Return the switches of a thread without applied tools. They are never resized."""
    return array("q", [LAYOUT_VERSION, True, True, 0, 0])
