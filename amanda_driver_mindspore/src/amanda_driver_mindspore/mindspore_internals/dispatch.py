"""MindSpore's modes of its dispatcher, which see each operator of a thread below autograd."""

from __future__ import annotations

import threading
from typing import Any

import mindspore
from mindspore import _c_expression

__all__ = ["HAS_MODES", "DispatchMode", "place"]

#: Whether this release has such modes.
HAS_MODES = hasattr(mindspore, "MsDispatchMode")
DispatchMode: Any = mindspore.MsDispatchMode if HAS_MODES else object


def place() -> tuple[int, int]:
    """Return the calling thread, and how many modes are entered there."""
    return threading.get_ident(), _c_expression._DispatchGuardStack.depth()
