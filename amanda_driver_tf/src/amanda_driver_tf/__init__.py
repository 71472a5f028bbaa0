"""Amanda's driver for TensorFlow.

It is found through the entry point ``amanda.drivers``. Users need not import anything from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_core.driver_kit import Choice
    from amanda_driver_tf.remaining_objects import Remnant

__all__ = ["interceptor", "remnants"]

__version__ = "0.1.0"


def interceptor() -> Choice:
    """Return the interceptor in use for eager operators, and why it was chosen.

    Both interceptors see the same operators.

    >>> import amanda_driver_tf
    >>> amanda_driver_tf.interceptor().name in ("native", "python")
    True
    """
    from amanda_driver_tf.interceptor_choice import INTERCEPTORS

    return INTERCEPTORS.choice()


def remnants() -> list[Remnant]:
    """List what stays in TensorFlow after tools are removed. It does not affect other programs.

    >>> import amanda_driver_tf
    >>> [remnant.what for remnant in amanda_driver_tf.remnants()]
    []
    """
    from amanda_driver_tf.remaining_objects import remnants

    return remnants()
