"""Interception: functions of MindSpore that are replaced while any thread is attached.

What writes or reads a model runs as without tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import ModelWriters, Routes, is_started_by_python, join
from amanda_driver_mindspore.mindspore_internals.cells import QUIET_FUNCTIONS, WRITERS
from amanda_driver_mindspore.mindspore_internals.doors import BOUNDARIES, doors
from amanda_driver_mindspore.mindspore_internals.programs import function_of, is_graph_mode

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
            self.route(door.owner, door.name, method, door.op_type or door.name)
        for name, (owner, attribute) in BOUNDARIES.items():
            self.route(owner, attribute, getattr(self.attachment, name), f"<{name}>")
        _WRITING.replace(self)

    def joins(self, name: str, arguments: Sequence[Any]) -> bool:
        """Return True if a call in a thread without tools has given it those for all threads."""
        return is_started_by_python() and join("mindspore", _first_of(name, arguments))


def _first_of(name: str, arguments: Sequence[Any]) -> str | None:
    """Return what a function runs first, an operator or a compiled program, or None."""
    if name == "run_op_async":
        return str(arguments[2])
    if name == "<run_compiled>":
        return str(function_of(arguments[0]).__name__)
    if name == "<call>" and is_graph_mode():
        return type(arguments[0]).__name__
    return None if name.startswith("<") else name.removeprefix("pyboost_")


def _of_type(method: Callable[..., Any], op_type: str) -> Callable[..., Any]:
    """Return a method of attachments for a door that runs one operator."""

    def called(attachment: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return method(attachment, op_type, original, *args, **kwargs)

    return called


ROUTES = Interception()
_WRITING = ModelWriters(QUIET_FUNCTIONS, WRITERS, ROUTES.quietly)
