"""PyTorch's driver: makes operators of PyTorch speak Amanda's language.

Found through the entry point ``amanda.drivers``; users need import nothing from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_driver_torch.doctor import Diagnosis

__all__ = ["interceptor"]

__version__ = "0.1.0"


def interceptor() -> Diagnosis:
    """Which interceptor is used, why, and what it cannot see; imports torch.

    >>> import amanda_driver_torch
    >>> amanda_driver_torch.interceptor().name in ("native", "function_mode")
    True
    """
    from amanda_driver_torch.doctor import diagnose

    return diagnose()
