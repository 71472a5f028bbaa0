"""Interception: functions of MindSpore that are replaced while any thread is attached.

What writes or reads a model runs as without tools.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import ModelWriters, Routes, is_started_by_python, join
from amanda_driver_mindspore.mindspore_internals.cells import QUIET_FUNCTIONS, WRITERS
from amanda_driver_mindspore.mindspore_internals.doors import BOUNDARIES, doors

__all__ = ["ROUTES", "Interception"]


class Interception(Routes):
    """Replacements of MindSpore's functions, which call the attachment of the thread.

    Attributes:
        attachment: The class of attachments, with a method for each form of a door, and for each
            boundary.
    """

    attachment: Any = None

    def install(self) -> None:
        """Replace all doors and boundaries."""
        for door in doors():
            method = getattr(self.attachment, door.form)
            method = _of_type(method, door.op_type) if door.op_type else method
            self.route(door.owner, door.name, method)
        for name, (owner, attribute) in BOUNDARIES.items():
            self.route(owner, attribute, getattr(self.attachment, name))
        _WRITING.replace(self)

    def joins(self, name: str, arguments: Sequence[Any]) -> bool:
        """Return True if a call in a thread without tools has given it those for all threads."""
        return is_started_by_python() and join("mindspore", _op_of(name, arguments))


#: Classes whose calls are not operators.
_AROUND = tuple(owner for owner, _ in BOUNDARIES.values() if isinstance(owner, type))


def _op_of(name: str, arguments: Sequence[Any]) -> str | None:
    """Return the type of the operator that a function is called for; None if there is none."""
    if name == "__call__":
        kind = type(arguments[0]).__name__
        is_operator = not isinstance(arguments[0], _AROUND)
        return kind.removesuffix("Prim_").removesuffix("Functional_") if is_operator else None
    if name == "run_op_async":
        return str(arguments[2])
    is_boundary = any(name == attribute for _, attribute in BOUNDARIES.values())
    return None if is_boundary else name.removeprefix("pyboost_")


def _of_type(method: Callable[..., Any], op_type: str) -> Callable[..., Any]:
    """Return a method of attachments for a door that runs one operator."""

    def called(attachment: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return method(attachment, op_type, original, *args, **kwargs)

    return called


ROUTES = Interception()


def _quietly_called(original: Callable[..., Any], writer: str) -> Callable[..., Any]:
    """Return a function that works on the program as it is without tools."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        attachment = ROUTES.attached.pop(thread, None)
        if attachment is None:
            return original(*args, **kwargs)
        try:
            if writer and attachment.session.enabled:
                attachment.session.warn_of_writer(writer)
            return original(*args, **kwargs)
        finally:
            if not attachment.session.closed:
                ROUTES.attached[thread] = attachment

    return call


_WRITING = ModelWriters(QUIET_FUNCTIONS, WRITERS, _quietly_called)
