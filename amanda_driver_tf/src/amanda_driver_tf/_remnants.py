"""What cannot be taken back when tools are left.

Owns the list of these things, which is complete. Imports TensorFlow only where the driver has it.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

__all__ = ["Remnant", "remnants"]


class Remnant(NamedTuple):
    """One thing that stays.

    Attributes:
        what: What it is.
        number: How many of it there are now.
        why: Why it stays, and until when.
    """

    what: str
    number: int
    why: str


def remnants() -> list[Remnant]:
    """Return what there is of it in this process."""
    if "amanda_driver_tf._graphs.recorder" not in sys.modules:
        return []
    from amanda_driver_tf._graphs import recorder
    from amanda_driver_tf._sessions import hiding

    found = [
        Remnant(
            "wrappers that note gradients while graphs are built",
            len(recorder.WRAPPED),
            "What is traced between two extents of `apply` must be known in the second; they call "
            "through, until the process ends",
        ),
        Remnant(
            "hidden clones of ops in graphs of sessions",
            sum(len(hidden.names) for hidden in hiding.all_hidden()),
            "TensorFlow cannot delete ops; the next tools that need the same ones use them again, "
            "and they go with their graph",
        ),
    ]
    return [remnant for remnant in found if remnant.number]
