"""Interception: methods of sessions that are replaced while any thread is attached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import Routes, is_started_by_python, join
from amanda_driver_onnxruntime.onnxruntime_internals.sessions import ENTRY_POINTS

__all__ = ["Interception"]


class Interception(Routes):
    """Replacements of the ways to run a session, which call the attachment of the thread.

    Args:
        attachment: The class of attachments, which has a method for each, by name.
    """

    def __init__(self, attachment: type) -> None:
        super().__init__()
        self._attachment = attachment

    def install(self) -> None:
        """Replace all entry points."""
        for owner, name in ENTRY_POINTS:
            self.route(owner, name, getattr(self._attachment, name))

    def joins(self, name: str, arguments: Sequence[Any]) -> bool:
        """Return True if a thread without an attachment has got one, of tools for all threads."""
        op = name if name.startswith("run") else None
        return is_started_by_python() and join("onnxruntime", op)
