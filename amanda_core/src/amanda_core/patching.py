"""Replacing attributes of modules and classes of a framework, for drivers that intercept this way.

Owns the count of users and the restoring. The originals are restored in reverse order after the
last user has released them, and also if replacing fails half-way.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

__all__ = ["Patch", "Patches"]


class Patch:
    """A replaced attribute of an object, which `undo` restores.

    Args:
        owner: A class or module.
        name: The attribute, its own or inherited.
        replacement: The new value.
    """

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement
        # The raw entry: reading a class attribute would bind a staticmethod or descriptor.
        self._inherited = name not in vars(owner)
        self._original = None if self._inherited else vars(owner)[name]
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Restore the original, unless somebody else has replaced the replacement."""
        if vars(self._owner).get(self._name) is not self._replacement:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)


class Patches(ABC):
    """Replacements that are made for their first user and undone after the last one.

    A driver subclasses it and implements `install`. Code that replaces more later must hold `lock`.
    """

    def __init__(self) -> None:
        self._count = 0
        self.lock = threading.RLock()
        self._undo: list[Callable[[], object]] = []

    def acquire(self) -> None:
        """Install the replacements, unless they are installed already."""
        with self.lock:
            self._count += 1
            if self._count > 1:
                return
            try:
                self.install()
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Undo the replacements if this was their last user."""
        with self.lock:
            self._count -= 1
            if self._count == 0:
                while self._undo:
                    self._undo.pop()()

    @abstractmethod
    def install(self) -> None:
        """Make the replacements with `replace` and `afterwards`."""

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace an attribute until the replacements are undone."""
        self._undo.append(Patch(owner, name, replacement).undo)

    def afterwards(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the replacements are undone, in reverse order."""
        self._undo.append(undo)
