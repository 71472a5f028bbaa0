"""Whether this installation has the native fast path, and why not.

Owns the import of the extension; everything that needs it asks here.
"""

from __future__ import annotations

from typing import Any

__all__ = ["missing", "native"]

#: The extension module, or None.
native: Any = None
#: Why there is none; empty where there is.
missing = ""

try:
    from amanda_driver_tf import _native  # type: ignore[attr-defined,unused-ignore]
except ImportError as error:
    missing = f"the extension was not built, or does not fit this Python ({error})"
else:
    native = _native
