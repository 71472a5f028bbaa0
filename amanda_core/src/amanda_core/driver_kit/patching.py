"""Replacing attributes of modules and classes of a framework, for drivers that intercept this way.

Owns the users, the restoring, and the way from a replaced function to the attachment of the thread
that calls it. The originals are restored in reverse order after the last user has released them,
and also if replacing fails half-way. An exception may arrive at any line: what is undone is on
record before it is done, and undoing can be repeated.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

__all__ = ["Patch", "Patches", "Routes", "made_once", "replacing"]

#: Number of replacements that one function keeps.
_KEPT = 256
#: What an attribute that an object does not have itself is in `_Found`.
_INHERITED = object()
#: Attributes that are replaced together: the owner, the method that reads its own entry of a name,
#: the name, the original and the replacement of each.
_Found = list[tuple[Any, Callable[..., Any], str, Any, Any]]


def made_once(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function make the replacement of an original once.

    Most time of entering `apply` would be spent on making the same ones again.

    Args:
        wrap: Returns what replaces a function, given it and hashable arguments.
    """
    #: By identity, since some frameworks' functions have no hash.
    made: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    @functools.wraps(wrap)
    def once(original: Any, *args: Any) -> Any:
        key = id(original), *args
        if key not in made:
            if len(made) >= _KEPT:  # A program may replace a function in each run.
                made.clear()
            made[key] = original, wrap(original, *args)
        return made[key][1]

    return once


def replacing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function that calls an original into one that returns the original's replacement.

    Args:
        call: Is given the original and the arguments of its call.

    Returns:
        A function that returns what replaces an original; it is made once.
    """

    @made_once
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return replacement

    return wrap


class Patch:
    """A replaced attribute of an object, which `undo` restores.

    Args:
        owner: A class or module.
        name: The attribute, its own or inherited.
        replacement: The new value.
        register: Is given `undo` before the attribute is replaced, since an exception may arrive
            before the caller gets the patch.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        replacement: Any,
        register: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._replaced = [_found(owner, name, replacement)]
        if register is not None:
            register(self.undo)
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Restore the original, unless somebody else has replaced the replacement."""
        _undo(self._replaced)


class Patches(ABC):
    """Replacements that are made for their first user and undone after the last one.

    A driver subclasses it and implements `install`. Code that replaces more later must hold `lock`.
    """

    def __init__(self) -> None:
        self._users: list[object] = []
        self.lock = threading.RLock()
        self._undo: list[Callable[[], object]] = []
        #: Function that finds attributes -> its arguments, and what it has found.
        self._kept: dict[object, tuple[tuple[Any, ...], _Found]] = {}

    def acquire(self, user: object = None) -> None:
        """Install the replacements, unless they are installed already.

        Args:
            user: Who releases them. A user that acquires them again, or releases them again,
                changes nothing. Without one, each `acquire` needs its `release`.
        """
        with self.lock:
            if user is not None and any(user is one for one in self._users):
                return
            try:
                self._users.append(user)
                if len(self._users) == 1:
                    self.restore()  # What an exception kept from being undone.
                    self.install()
            except BaseException:
                self.release(user)
                raise

    def release(self, user: object = None) -> None:
        """Undo the replacements if this was their last user."""
        with self.lock:
            for index in [i for i, one in enumerate(self._users) if one is user][-1:]:
                del self._users[index]
            if not self._users:
                self.restore()

    def restore(self) -> None:
        """Undo the replacements, the last one first; may be called again after an exception."""
        while self._undo:
            self._undo[-1]()
            del self._undo[-1]

    @abstractmethod
    def install(self) -> None:
        """Make the replacements with `replace` and `afterwards`."""

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace an attribute until the replacements are undone."""
        self._set([_found(owner, name, replacement)])

    def replace_found(
        self, find: Callable[..., Iterable[tuple[Any, str, Any]]], *arguments: Any
    ) -> None:
        """Replace the attributes that a function finds until the replacements are undone.

        It is called again only if one of the attributes has changed meanwhile, or with other
        arguments: finding and wrapping the functions would take most of the time of entering
        `apply`.

        Args:
            find: Yields the owner, the name and the replacement of each attribute. It depends only
                on these attributes and its arguments.
            *arguments: Arguments for it.

        """
        known, found = self._kept.get(find, ((), []))
        if known != arguments or not _is_as_found(found):
            found = [_found(*one) for one in find(*arguments)]
            self._kept[find] = arguments, found
        self._set(found)

    def _set(self, found: _Found) -> None:
        self.afterwards(functools.partial(_undo, found))
        for owner, _, name, _, replacement in found:
            setattr(owner, name, replacement)

    def replaced(self) -> Iterator[tuple[Any, Any]]:
        """Yield the replacement and the original of each attribute that is replaced now.

        The originals of attributes that their owners have inherited are left out.
        """
        for undo in self._undo:
            if isinstance(undo, functools.partial) and undo.func is _undo:
                for *_, original, replacement in undo.args[0]:
                    if original is not _INHERITED:
                        yield replacement, original

    def afterwards(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the replacements are undone, in reverse order.

        Register it before what it undoes. It may be called more than once, and in vain.
        """
        self._undo.append(undo)


def _found(owner: Any, name: str, replacement: Any) -> tuple[Any, Any, str, Any, Any]:
    # The raw entry: reading a class attribute would bind a staticmethod or descriptor.
    read = vars(owner).get
    return owner, read, name, read(name, _INHERITED), replacement


def _is_as_found(found: _Found) -> bool:
    for _, read, name, original, _ in found:
        if read(name, _INHERITED) is not original:
            return False
    return bool(found)


def _undo(found: _Found) -> None:
    """Restore the originals of replaced attributes, unless somebody else has replaced them."""
    for owner, read, name, original, replacement in reversed(found):
        # One that was not set, since an exception came before, is not None.
        if read(name, found) is not replacement:
            continue
        if original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


class _Thread(threading.local):
    """A key of one thread, since another one may get its number once it has ended."""

    def __init__(self) -> None:
        self.key = object()


_THREAD = _Thread()


class Routes(Patches):
    """Functions of a framework whose calls go to the attachment of the calling thread.

    Threads without an attachment run the functions as they were found. A driver subclasses it and
    implements `install` with `route`.

    Attributes:
        attached: Key of a thread -> its attachment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attached: dict[object, Any] = {}

    def attach(self, attachment: Any) -> None:
        """Route the calls of this thread to an attachment."""
        self.acquire(attachment)
        self.attached[_THREAD.key] = attachment

    def detach(self, attachment: Any) -> None:
        """Restore the functions for the thread of an attachment."""
        self._forget(attachment)
        self.release(attachment)

    def move(self, attachment: Any) -> None:
        """Route the calls of this thread to an attachment of a thread that has ended."""
        self._forget(attachment)
        self.attached[_THREAD.key] = attachment

    def here(self) -> Any:
        """Return the attachment of this thread, or None."""
        return self.attached.get(_THREAD.key)

    def _forget(self, attachment: Any) -> None:
        for thread in [thread for thread, one in self.attached.items() if one is attachment]:
            del self.attached[thread]

    def quietly(self, original: Callable[..., Any], writer: str) -> Callable[..., Any]:
        """Return a function that works on the program as it is without tools, for `ModelWriters`.

        Args:
            original: The function.
            writer: What programs call it, if it writes the model for others: then it warns.
        """

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            attachment = self.attached.pop(_THREAD.key, None)
            if attachment is None:
                return original(*args, **kwargs)
            session = attachment.session
            try:
                if writer and session.enabled:
                    session.warn_of_writer(writer)
                return original(*args, **kwargs)
            finally:
                if not session.closed:
                    self.attached[_THREAD.key] = attachment

        return call

    def joins(self, name: str, arguments: Sequence[Any]) -> bool:
        """Return True if a call in a thread without an attachment has given it one.

        A driver with ``threads`` overrides it with a call of `amanda_core.driver_kit.join`.

        Args:
            name: The function, or the label that `route` was given for it.
            arguments: What it was called with.
        """
        return False

    def route(
        self, owner: Any, name: str, method: Callable[..., Any], label: str | None = None
    ) -> None:
        """Replace a function until the replacements are undone.

        Args:
            owner: A class or module.
            name: The function.
            method: Is called instead, with the attachment, the function that was found, and the
                arguments.
            label: What `joins` is given for the function, if not its name.
        """
        original = getattr(owner, name)
        label = name if label is None else label

        def routed(*args: Any, **kwargs: Any) -> Any:
            attachment = self.here()
            if attachment is None and self.joins(label, args):
                attachment = self.here()
            if attachment is None:
                return original(*args, **kwargs)
            return method(attachment, original, *args, **kwargs)

        self.replace(owner, name, routed)
