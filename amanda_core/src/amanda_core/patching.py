"""Attributes of other people's modules and classes, replaced while somebody needs it.

Owns how often what is replaced is needed, and that it is put back: in reverse order, after the last
one who needs it has gone, and also where replacing fails half-way. For drivers that intercept by
replacing.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

__all__ = ["Patch", "Patches"]


class Patch:
    """One attribute of an object, replaced and put back.

    Args:
        owner: A class or module.
        name: The attribute, its own or inherited.
        replacement: What stands there meanwhile.
    """

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement
        # The raw entry: reading a class attribute would bind a staticmethod or descriptor.
        self._inherited = name not in vars(owner)
        self._original = None if self._inherited else vars(owner)[name]
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put the original back, unless somebody else has replaced the replacement."""
        if vars(self._owner).get(self._name) is not self._replacement:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)


class Patches(ABC):
    """Replacements that are made for the first one who needs them and undone after the last.

    A driver subclasses it and implements `install`. What replaces more later holds `lock`.
    """

    def __init__(self) -> None:
        self._count = 0
        self.lock = threading.RLock()
        self._undo: list[Callable[[], object]] = []

    def acquire(self) -> None:
        """Install the replacements, unless they are."""
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
        """Undo the replacements when nobody needs them any more."""
        with self.lock:
            self._count -= 1
            if self._count == 0:
                while self._undo:
                    self._undo.pop()()

    @abstractmethod
    def install(self) -> None:
        """Make the replacements, by `replace` and `afterwards`."""

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace an attribute until the replacements are undone."""
        self._undo.append(Patch(owner, name, replacement).undo)

    def afterwards(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the replacements are undone, in reverse order."""
        self._undo.append(undo)
