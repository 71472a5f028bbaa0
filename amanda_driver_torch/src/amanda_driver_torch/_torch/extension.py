"""Whether this installation has the native interceptor, and why not.

Owns the import of the extension; everything that needs it asks here. Where the version of torch was
never tried, a self-test decides.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from amanda_core.interceptors import NATIVE
from amanda_driver_torch._torch.versions import VERSIONS

__all__ = ["missing", "native", "thread_fields"]

#: The extension module, or None.
native: Any = None
#: Why there is none; empty where there is.
missing = ""

try:
    _native = importlib.import_module("amanda_driver_torch._native")
except ImportError as error:
    missing = f"the extension was not built, or does not fit this Python ({error})"
else:
    missing = VERSIONS.failure(NATIVE)
    native = None if missing else _native


def thread_fields() -> Mapping[str, Any]:
    """The fields of a thread's state that the extension keeps, as descriptors by name."""
    return {} if native is None else native.THREAD_FIELDS
