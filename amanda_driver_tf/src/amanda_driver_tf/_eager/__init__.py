"""The eager mode: operators that TensorFlow executes one by one, and their gradients on tapes."""

from __future__ import annotations

from amanda_driver_tf._eager.mode import EagerMode

__all__ = ["EagerMode"]
