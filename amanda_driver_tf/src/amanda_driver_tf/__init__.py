"""TensorFlow's driver: makes operators of TensorFlow speak Amanda's language.

Found through the entry point ``amanda.drivers``; users need import nothing from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_core.interceptors import Choice
    from amanda_driver_tf._remnants import Remnant

__all__ = ["interceptor", "remnants"]

__version__ = "0.1.0"


def interceptor() -> Choice:
    """Return the interceptor of eager operators that is used, and why; both see the same.

    >>> import amanda_driver_tf
    >>> amanda_driver_tf.interceptor().name in ("native", "python")
    True
    """
    from amanda_driver_tf._interceptor_choice import INTERCEPTORS

    return INTERCEPTORS.choice()


def remnants() -> list[Remnant]:
    """Return what stays in TensorFlow once tools are left; it does nothing for other programs.

    >>> import amanda_driver_tf
    >>> [remnant.what for remnant in amanda_driver_tf.remnants()]
    []
    """
    from amanda_driver_tf._remnants import remnants

    return remnants()
