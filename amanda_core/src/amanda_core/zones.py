"""The zone of a call: which part of a program runs that is not the model, such as an optimizer.

Owns the search for frameworks whose parts are told apart by their modules. Drivers import it; the
engine does not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType, FrameType

__all__ = ["zone_of"]


def zone_of(zones: Mapping[str, str], boundary: CodeType | None = None) -> str:
    """Return which part of a program runs, by the modules of the frames around its caller.

    Args:
        zones: What the name of a module starts with -> the zone of all that it calls.
        boundary: Code at which the search ends, such as that of the call of a module.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not boundary:
        module = str(frame.f_globals.get("__name__", ""))
        zone = next((zone for name, zone in zones.items() if module.startswith(name)), None)
        if zone is not None:
            return zone
        frame = frame.f_back
    return "model"
