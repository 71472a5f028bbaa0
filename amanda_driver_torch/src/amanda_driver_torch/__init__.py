"""Amanda's driver for PyTorch.

It is found through the entry point ``amanda.drivers``. Users need not import anything from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_driver_torch.doctor import Diagnosis

__all__ = ["interceptor"]

__version__ = "0.1.0"


def interceptor() -> Diagnosis:
    """Return the interceptor in use, why it was chosen, and what it cannot see; imports torch.

    >>> import amanda_driver_torch
    >>> amanda_driver_torch.interceptor().name in ("native", "function_mode")
    True
    """
    from amanda_driver_torch.doctor import diagnose

    return diagnose()
