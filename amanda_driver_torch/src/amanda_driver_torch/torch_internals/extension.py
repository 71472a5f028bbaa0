"""The native extension: whether this installation has it, and why not.

Owns its import; everything that needs it imports it from here. A self-test decides for versions of
torch that were never tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from amanda_core.driver_kit import NATIVE, load_extension
from amanda_driver_torch.torch_internals.versions import VERSIONS

F = TypeVar("F", bound=Callable[..., Any])

#: The extension module or None, and why there is none.
native, missing = load_extension("amanda_driver_torch._native")
if native is not None:
    missing = VERSIONS.failure(NATIVE)
    native = None if missing else native


def thread_fields() -> Mapping[str, Any]:
    """Return descriptors of the thread-state fields that the extension stores, by name."""
    return {} if native is None else native.THREAD_FIELDS


def hastened(replacement: F, is_hastened: bool = True) -> F:
    """Let a Python function call its `__wrapped__` in C where operators are not instrumented.

    CPython 3.11 ignores this where code calls the function by its name.
    """
    if native is not None:
        native.hasten(replacement, is_hastened)
    return replacement
