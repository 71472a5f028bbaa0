"""The native extension: whether this installation has it, and why not.

Owns its import; everything that needs it imports it from here. A self-test decides for versions of
torch that were never tested.
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
#: Why there is none; empty if there is one.
missing = ""

try:
    _native = importlib.import_module("amanda_driver_torch._native")
except ImportError as error:
    missing = f"the extension was not built, or does not fit this Python ({error})"
else:
    missing = VERSIONS.failure(NATIVE)
    native = None if missing else _native


def thread_fields() -> Mapping[str, Any]:
    """Return descriptors of the thread-state fields that the extension stores, by name."""
    return {} if native is None else native.THREAD_FIELDS
