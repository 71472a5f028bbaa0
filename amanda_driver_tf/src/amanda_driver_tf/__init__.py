"""TensorFlow's driver: makes operators of TensorFlow speak Amanda's language.

Found through the entry point ``amanda.drivers``; users import nothing from here.
"""

from __future__ import annotations

__version__ = "0.1.0"
