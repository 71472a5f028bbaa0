"""Interception: functions of MXNet that are replaced while any thread is attached.

Operators are called through `_imperative_invoke`; methods that make views, and a few functions,
call the C library themselves. What writes or reads a model runs as without tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import ModelWriters, Routes, is_started_by_python, join
from amanda_driver_mxnet.mxnet_internals.arrays import ENTRY_POINTS, op_info
from amanda_driver_mxnet.mxnet_internals.savers import QUIET_FUNCTIONS, WRITERS

__all__ = ["ATTACHED", "ROUTES", "Interception"]


class Interception(Routes):
    """Replacements of MXNet's functions, which call the attachment of the thread.

    Attributes:
        attachment: The class of attachments. It has a method for some of the functions, by name;
            `function` executes the others.
    """

    attachment: Any = None

    def install(self) -> None:
        """Replace all entry points."""
        for name, (owner, attribute) in ENTRY_POINTS.items():
            method = getattr(self.attachment, name, None) or _function(name)
            self.route(owner, attribute, method, name)
        _WRITING.replace(self)

    def joins(self, name: str, arguments: Sequence[Any]) -> bool:
        """Return True if a thread without an attachment has got one, of tools for all threads."""
        op: str | None = name
        if name == "invoke":
            op = op_info(arguments[0]).name
        elif name != "run_graph" and hasattr(self.attachment, name):
            op = None  # It is not an operator.
        # Operators of MXNet's workers belong to the thread that waits for them.
        return is_started_by_python() and join("mxnet", op)


def _function(name: str) -> Callable[..., Any]:
    """Return a method of attachments for an operator that calls the C library itself."""

    def function(attachment: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return attachment.function(name, original, *args, **kwargs)

    return function


ROUTES = Interception()
#: Key of a thread -> its attachment.
ATTACHED = ROUTES.attached
_WRITING = ModelWriters(QUIET_FUNCTIONS, WRITERS, ROUTES.quietly)
