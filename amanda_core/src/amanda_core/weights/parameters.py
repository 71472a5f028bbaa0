"""`Parameters`: finding the parameter that a value is, or shows a part of.

Owns the table from memory to parameters, and when it is made again. Parameters are found by where
they lie in memory, not by how a value was computed. A parameter is referred to by its module and
name, because a weak reference to a tensor keeps a framework from exchanging its content.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from amanda_core.modules.scopes import Labels, Scopes
from amanda_core.runtime.weak import Known
from amanda_core.weights.geometry import Memory, Place, place_in, region_text

__all__ = ["Found", "Layouts", "Parameters"]


@dataclass(frozen=True)
class Layouts:
    """A driver's functions about its framework's tensors.

    Attributes:
        memory: Returns where a tensor lies; None if unknown.
        shape: Returns its dimensions.
        hold: Returns an object that keeps other tensors from where it lies, or None.
        base: Returns the tensor of which it is a view, or itself.
        is_parameter: Returns True if the framework marks it as a parameter of a model.
        is_weight: Returns True if it may be a weight although it is not marked.
        version: Returns a number that grows with each write to it; None if writes are not counted.
        attribute: Returns the parameter that a module holds by a name, or None.
        key: Returns the key of `memory` alone, or None if there is a faster way.
    """

    memory: Callable[[Any], Memory | None]
    shape: Callable[[Any], tuple[int, ...] | None]
    hold: Callable[[Any], object]
    base: Callable[[Any], Any]
    is_parameter: Callable[[Any], bool]
    is_weight: Callable[[Any], bool]
    version: Callable[[Any], int | None]
    attribute: Callable[[Any, str], Any]
    key: Callable[[Any], Hashable] | None = None


class Found(NamedTuple):
    """A parameter, and the part of it that a value shows.

    Attributes:
        root: Label of the first outermost module called that holds it, or of the one whose method
            called that module; empty outside of modules.
        name: Its qualified name there; outside of modules a number with a ``#``.
        token: A number that is never used again, for a parameter without a name; else 0.
        shape: Its dimensions.
        memory: Where it lies; None if unknown.
        place: The part that the value shows.
        get: Returns the current parameter; None if it has died.
        path: Its name in the root whose op reads it, and the region. Another root and a colon come
            before it if that root does not hold it.
    """

    root: str
    name: str
    token: int
    shape: tuple[int, ...]
    memory: Memory | None
    place: Place
    get: Callable[[], Any]
    path: str = ""


#: A parameter of a root: the root and name by which it was known first, its name, and a function
#: that returns it. A plain tuple, because there is one for each parameter of a model.
_Entry = tuple[tuple[str, str], str, partial[Any]]

_NOT_LISTED: tuple[Callable[[], Any], set[Hashable]] = (lambda: None), set()


class Parameters:
    """The parameters of the models that run, and those outside of models when they are used.

    Args:
        scopes: Names the parameters of modules.
        labels: Numbers all other parameters.
        layouts: The driver's functions about its tensors.

    Attributes:
        sessions: How many sessions have used them; a driver counts. Writes between sessions may not
            be counted by the framework.
    """

    def __init__(self, scopes: Scopes, labels: Labels, layouts: Layouts) -> None:
        self._scopes, self._labels, self._layouts = scopes, labels, layouts
        #: Returns the model of a label; None if it has died.
        self.model = scopes.root
        #: Returns where a tensor lies; None if unknown.
        self.memory = layouts.memory
        self._key = layouts.key or (lambda value: (m := layouts.memory(value)) and m.key)
        self.sessions = 0
        #: Held to change what follows, which threads share.
        self._lock = threading.RLock()
        #: Label of a root -> a module of it, and the memory of its parameters. Few ops read parts
        #: of parameters, so what follows is made for the first of them.
        self._keys: dict[str, tuple[Callable[[], Any], set[Hashable]]] = {}
        #: Memory of a parameter -> the labels of the roots that list it, as keys.
        self._roots: dict[Hashable, dict[str, None]] = {}
        #: Label of a root -> its parameters, by their memory, and by their names.
        self._tables: dict[str, dict[Hashable, list[_Entry]]] = {}
        self._entries: dict[str, dict[str, _Entry]] = {}
        #: Parameter -> its owner, see `_Entry`.
        self._owners: Known[tuple[str, str]] = Known()
        #: Parameters that no root holds, as of when the table was made last.
        self._strangers: Known[bool] = Known()

    def shapes(self, root: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter of a root, by the root that owns it and its name."""
        self._table(root)
        held = [(owner, get()) for owner, _, get in self._entries[root].values()]
        shapes = [(":".join(owner), self._layouts.shape(p)) for owner, p in held if p is not None]
        return {name: shape for name, shape in shapes if shape is not None}

    def classes(self, root: str) -> dict[str, str]:
        """Return the name of the class of each module of a root by its path."""
        return self._scopes.classes(root)

    def class_at(self, root: str, path: str) -> str | None:
        """Return the name of the class of a module of a root that no other one holds, else None."""
        return self._scopes.class_at(root, path)

    def find(self, value: Any, root: str, operand: bool = True) -> Found | None:
        """Return the parameter that a tensor is or shows a part of; None if there is none.

        Args:
            value: The tensor.
            root: Label of the root whose operator reads it; empty outside of modules.
            operand: Whether the position may hold a weight that is not marked as a parameter.
        """
        layouts, key = self._layouts, self._key(value)
        # Outside of modules, parameters of the models that have run are read as well.
        for label in (root,) if root else self._roots_of(key):
            first, keys = self._keys.get(label, _NOT_LISTED)
            # Another model may have the label of one that has died.
            keys = keys if first() is not None else self._list(label)
            if key in keys and (found := self._held(value, label, key)) is not None:
                return found if root else found._replace(path=f"{label}:{found.path}")
        base = layouts.base(value)
        marked = layouts.is_parameter(base)
        is_weight = marked or (operand and layouts.is_weight(base))
        if root and is_weight and not self._strangers.get(base):
            # The table lacks this parameter: it has moved, or is newer than the table.
            self.forget(root)
            if (found := self._held(value, root, key)) is not None:
                return found
            # A transform such as `vmap` exchanges parameters for values that lie nowhere, and takes
            # them back.
            if None not in self._keys.get(root, _NOT_LISTED)[1]:
                self._strangers.set(base, True)
        if marked or (is_weight and not root):
            return self._unnamed(value, base)
        return None

    def version(self, parameter: Any) -> tuple[object, ...] | None:
        """Return an object that changes with each write to a parameter, if the framework counts
        writes.

        It also changes with each session. None if the framework does not count writes.
        """
        layouts = self._layouts
        if (number := layouts.version(parameter)) is None:
            return None
        # While the memory is held, no other tensor gets its address.
        return self.sessions, layouts.memory(parameter), number, layouts.hold(parameter)

    def is_counted(self, tensor: Any) -> bool:
        """Return True if the framework counts writes to a tensor."""
        return self._layouts.version(tensor) is not None

    def counts_writes(self, value: Any, parameter: Any) -> bool:
        """Return True if a write to this tensor, which shows a parameter, changes the version."""
        return parameter is not None and self._layouts.base(value) is parameter

    def forget(self, root: str) -> None:
        """Make the table of a root again when it is used next."""
        with self._lock:
            for key in self._keys.pop(root, _NOT_LISTED)[1]:
                del self._roots[key][root]
                if not self._roots[key]:
                    del self._roots[key]

    def _roots_of(self, key: Hashable) -> tuple[str, ...]:
        with self._lock:  # Another thread may be listing a root again.
            return tuple(self._roots.get(key, ()))

    def _held(self, value: Any, root: str, key: Hashable, again: bool = True) -> Found | None:
        layouts = self._layouts
        for (owner, owned), name, get in self._table(root).get(key, ()):
            held = get()
            if held is None or self._key(held) != key or not self._holds(owner, owned, held):
                # Another tensor may lie here now.
                self.forget(root)
                return self._held(value, root, key, False) if again else None
            memory = layouts.memory(value)
            whole = memory if held is value else layouts.memory(held)
            if (shape := layouts.shape(held)) is None:
                continue
            place = _whole(shape) if held is value else None
            if whole is not None and memory is not None:
                place = place_in(whole, memory)
            if place is not None:
                path = name + region_text(place.region)
                return Found(owner, owned, 0, shape, whole, place, get, path)
        return None

    def _holds(self, root: str, name: str, parameter: Any) -> bool:
        entry = self._entries.get(root, {}).get(name)
        return entry is not None and entry[2]() is parameter

    def _unnamed(self, value: Any, base: Any) -> Found | None:
        shape, whole = self._layouts.shape(base), self._layouts.memory(base)
        memory = self._layouts.memory(value)
        if shape is None:
            return None
        place = (place_in(whole, memory) if whole and memory else None) or _whole(shape)
        token, number = self._labels.look_up(base)
        name, get = f"#{number}", partial(self._labels.tensor, token)
        return Found("", name, token, shape, whole, place, get, name + region_text(place.region))

    def _list(self, root: str) -> set[Hashable]:
        """Return the memory of the parameters of a root, listed again."""
        if root in self._scopes.held_by:
            self._list(self._scopes.held_by[root])
        weights = self._scopes.weights(root)
        keys = {self._key(parameter) for _, _, parameter in weights}
        first = weakref.ref(weights[0][1]) if weights else lambda: root
        with self._lock:
            self.forget(root)
            self._keys[root] = first, keys
            for key in keys:
                self._roots.setdefault(key, {})[root] = None
            self._tables.pop(root, None)
        return keys

    def _table(self, root: str) -> dict[Hashable, list[_Entry]]:
        if self._keys.get(root, _NOT_LISTED)[0]() is None:
            self._list(root)
        table = self._tables.get(root)
        if table is None:
            if root in self._scopes.held_by:
                self._table(self._scopes.held_by[root])
            table, entries = {}, {}
            for name, module, parameter in self._scopes.weights(root):
                get = partial(self._current, weakref.ref(module), name.rpartition(".")[2])
                # A part of a model may be called by itself: `generate` calls the encoder, then the
                # model. Its parameters are owned by the model whose method calls it.
                owner = self._owners.get(parameter)
                if owner is None or owner[0] == root or not self._holds(*owner, parameter):
                    self._owners.set(parameter, owner := (root, name))
                entry = entries[name] = (owner, name, get)
                table.setdefault(self._key(parameter), []).append(entry)
            # At once, since another thread may look meanwhile.
            self._entries[root], self._tables[root] = entries, table
        return table

    def _current(self, owner: weakref.ref[Any], name: str) -> Any:
        module = owner()
        return None if module is None else self._layouts.attribute(module, name)


def _whole(shape: tuple[int, ...]) -> Place:
    return Place((), True, tuple(range(len(shape))))
