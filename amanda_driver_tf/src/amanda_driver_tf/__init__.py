"""TensorFlow's driver: makes operators of TensorFlow speak Amanda's language.

Found through the entry point ``amanda.drivers``; users need import nothing from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_driver_tf._interceptor import Choice
    from amanda_driver_tf._remnants import Remnant

__all__ = ["interceptor", "remnants"]

__version__ = "0.1.0"


def interceptor() -> Choice:
    """Which interceptor of eager operators is used, and why; both see the same.

    >>> import amanda_driver_tf
    >>> amanda_driver_tf.interceptor().name in ("native", "python")
    True
    """
    from amanda_driver_tf._interceptor import choice

    return choice()


def remnants() -> list[Remnant]:
    """What stays in TensorFlow once tools are left, with its extent; inert for everybody else.

    >>> import amanda_driver_tf
    >>> [remnant.what for remnant in amanda_driver_tf.remnants()]
    []
    """
    from amanda_driver_tf._remnants import remnants

    return remnants()
