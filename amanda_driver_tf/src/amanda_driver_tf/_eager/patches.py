"""`Patch`: one attribute of an object, replaced and put back."""

from __future__ import annotations

from typing import Any

__all__ = ["Patch"]


class Patch:
    """One attribute of an object, replaced and put back.

    Args:
        owner: A class or module.
        name: The attribute.
        replacement: What stands there meanwhile.
    """

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement
        # The raw entry: reading a class attribute would bind it.
        self._original = vars(owner)[name]
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put the original back, unless somebody else has replaced the replacement."""
        if vars(self._owner).get(self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
