"""`CallSite`: whether an op is called from where it was called last time.

Owns the comparison of a call site with the stack. What a call site is, `sites` says. The same in
C is `native/call_site.c`; the two agree.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any, Protocol

from amanda_driver_tf import _build
from amanda_driver_tf._interceptor_choice import INTERCEPTORS

__all__ = ["CallSite", "Chain", "PythonCallSite", "call_site_class"]

#: The frames of a call site that count, innermost first: depth above what called the op, code,
#: offset (-1 for any).
Chain = tuple[tuple[int, CodeType, int], ...]

# `here`, `Forward.locate` and what called that stand in between.
_BETWEEN = 3


class CallSite(Protocol):
    """A call site, made of a `Chain`."""

    def __init__(self, chain: Chain, /) -> None: ...

    def here(self) -> bool:
        """Return True if the op is called from here; for `Forward.locate`."""


class PythonCallSite:
    """A call site that looks at frames by depth: those in between are not made objects of."""

    __slots__ = ("_chain",)

    def __init__(self, chain: Chain, /) -> None:
        self._chain = tuple((depth + _BETWEEN, code, offset) for depth, code, offset in chain)

    def here(self, *, _frame: Any = sys._getframe) -> bool:
        """Return True if the op is called from here; for `Forward.locate`."""
        try:
            for depth, code, offset in self._chain:
                frame = _frame(depth)
                if (frame.f_lasti != offset and offset >= 0) or frame.f_code is not code:
                    return False
        except ValueError:  # The stack is not that deep.
            return False
        return True


def call_site_class() -> type[CallSite]:
    """The class of call sites that a new session uses."""
    return _build.native.CallSite if INTERCEPTORS.choice().name == "native" else PythonCallSite
