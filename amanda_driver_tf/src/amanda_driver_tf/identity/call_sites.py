"""`CallSite`: checks whether an op is called from the same place as last time.

Owns the comparison of a call site with the stack. `sites` defines call sites. `native/call_site.c`
does the same in C, and both agree.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any, Protocol

from amanda_driver_tf.interceptor_choice import INTERCEPTORS
from amanda_driver_tf.tensorflow_internals import extension

__all__ = ["CallSite", "Chain", "PythonCallSite", "call_site_class"]

#: The frames of a call site, innermost first: depth above the op's caller, code, offset (-1 for
#: any).
Chain = tuple[tuple[int, CodeType, int], ...]

# The frames of `here`, `Forward.locate` and the caller of that.
_BETWEEN = 3


class CallSite(Protocol):
    """A call site, made of a `Chain`."""

    def __init__(self, chain: Chain, /) -> None: ...

    def here(self) -> bool:
        """Return True if the op is called from this place; must be called by `Forward.locate`."""


class PythonCallSite:
    """A call site that reads frames by depth, so that no objects are made of those in between."""

    __slots__ = ("_chain",)

    def __init__(self, chain: Chain, /) -> None:
        self._chain = tuple((depth + _BETWEEN, code, offset) for depth, code, offset in chain)

    def here(self, *, _frame: Any = sys._getframe) -> bool:
        """Return True if the op is called from this place; must be called by `Forward.locate`."""
        try:
            for depth, code, offset in self._chain:
                frame = _frame(depth)
                if (frame.f_lasti != offset and offset >= 0) or frame.f_code is not code:
                    return False
        except ValueError:  # The stack is not that deep.
            return False
        return True


def call_site_class() -> type[CallSite]:
    """Return the class of call sites for new sessions."""
    return extension.native.CallSite if INTERCEPTORS.choice().name == "native" else PythonCallSite
