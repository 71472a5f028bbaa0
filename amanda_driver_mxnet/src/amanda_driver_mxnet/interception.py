"""Interception: functions of MXNet that are replaced while any thread is attached.

Operators are called through `_imperative_invoke`; methods that make views, and a few functions,
call the C library themselves. What writes or reads a model runs as without tools.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import ModelWriters, Patches, is_started_by_python, join
from amanda_driver_mxnet.mxnet_internals.arrays import ENTRY_POINTS, op_info
from amanda_driver_mxnet.mxnet_internals.savers import QUIET_FUNCTIONS, WRITERS

__all__ = ["ATTACHED", "THREAD", "Interception"]

#: Key of a thread -> its attachment.
ATTACHED: dict[object, Any] = {}


class _Thread(threading.local):
    """A key of one thread, since another one may get its number once it has ended."""

    def __init__(self) -> None:
        self.key = object()


THREAD = _Thread()


class Interception(Patches):
    """Replacements of MXNet's functions, which call the attachment of the thread if it has one.

    Args:
        attachment: The class of attachments. It has a method for some of the functions, by name;
            `function` executes the others.
    """

    def __init__(self, attachment: type) -> None:
        super().__init__()
        self._attachment = attachment

    def install(self) -> None:
        """Replace all entry points."""
        for name, (owner, attribute) in ENTRY_POINTS.items():
            self.replace(owner, attribute, self._replacement(name, getattr(owner, attribute)))
        _WRITING.replace(self)

    def _replacement(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        method = getattr(self._attachment, name, None)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            attachment = ATTACHED.get(THREAD.key)
            # Operators of MXNet's workers belong to the thread that waits for them.
            is_ours = attachment is None and is_started_by_python()
            if is_ours and join("mxnet", _op_of(name, method is None, args)):
                attachment = ATTACHED.get(THREAD.key)
            if attachment is None:
                return original(*args, **kwargs)
            if method is not None:
                return method(attachment, original, *args, **kwargs)
            return attachment.function(name, original, *args, **kwargs)

        return replacement


def _op_of(name: str, is_operator: bool, args: Sequence[Any]) -> str | None:
    """Return the type of the operator that an entry point is called for; None if there is none."""
    if name == "invoke":
        return op_info(args[0]).name
    return name if is_operator or name == "run_graph" else None


def _quietly_called(original: Callable[..., Any], writer: str) -> Callable[..., Any]:
    """Return a function that works on the program as it is without tools."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        thread = THREAD.key
        attachment = ATTACHED.pop(thread, None)
        if attachment is None:
            return original(*args, **kwargs)
        try:
            if writer and attachment.session.enabled:
                attachment.session.warn_of_writer(writer)
            return original(*args, **kwargs)
        finally:
            if not attachment.session.closed:
                ATTACHED[thread] = attachment

    return call


_WRITING = ModelWriters(QUIET_FUNCTIONS, WRITERS, _quietly_called)
