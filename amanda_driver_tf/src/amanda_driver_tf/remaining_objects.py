"""The objects that stay in TensorFlow after tools are removed.

Owns the complete list. Imports TensorFlow only if the driver has done so already.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

__all__ = ["Remnant", "remnants"]


class Remnant(NamedTuple):
    """One kind of object that stays.

    Attributes:
        what: A description of the object.
        number: How many of them exist now.
        why: Why it stays, and until when.
    """

    what: str
    number: int
    why: str


def remnants() -> list[Remnant]:
    """List what stays in this process."""
    if "amanda_driver_tf.graphs.recorder" not in sys.modules:
        return []
    from amanda_driver_tf.execution.sessions import hiding
    from amanda_driver_tf.graphs import layer_calls, recorder

    found = [
        Remnant(
            "wrappers that record gradients while graphs are built",
            len(recorder.WRAPPED),
            "A function traced outside of `apply` may run inside a later one. The wrappers only "
            "call the original functions; they stay until the process ends",
        ),
        Remnant(
            "wrappers that record calls of layers while graphs are built",
            len(layer_calls.RECORDED),
            "As above",
        ),
        Remnant(
            "hidden clones of ops in graphs of sessions",
            sum(len(hidden.names) for hidden in hiding.all_hidden()),
            "TensorFlow cannot delete ops. They are reused by the next tools that need the same "
            "ones, and are freed with their graph",
        ),
    ]
    return [remnant for remnant in found if remnant.number]
