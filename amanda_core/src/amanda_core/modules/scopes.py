"""Scopes: the paths of the modules of a model, and the names of their weights.

Owns the names of roots (outermost modules called, numbered by first call), of the modules and
weights under them, and numbers for weights outside of any module. The driver reports what a module
holds. Without modules, all ops are `OUTSIDE`. Modules and weights are held weakly.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from amanda_core.runtime.weak import Known

__all__ = ["OUTSIDE", "Activation", "Labels", "Scope", "Scopes"]


class Scope:
    """A module under its root; `number` is unique in this process.

    Attributes:
        root: Label of the outermost module; empty outside of any module.
        path: Path of the module.
        zone: Part of the program to which all of its ops belong; empty if they differ.
        around: The same place outside of the zone; None if it is in none.
    """

    __slots__ = ("around", "number", "path", "root", "zone")

    def __init__(
        self, number: int, root: str, path: str, zone: str = "", around: Scope | None = None
    ) -> None:
        self.number, self.root, self.path, self.zone = number, root, path, zone
        self.around = around


OUTSIDE = Scope(0, "", "")


class Activation:
    """One call of a module: its scope, and how often each site was passed during the call.

    Attributes:
        last: The record that was passed last, if the driver keeps it for a fast path.
    """

    __slots__ = ("counts", "last", "scope")

    def __init__(self, scope: Scope, counts: dict[Any, int] | None = None) -> None:
        self.scope = scope
        self.counts: dict[Any, int] = counts if counts is not None else {}
        self.last: Any = None

    def copy(self) -> Activation:
        """Return a copy of the current state, which a recomputation can resume."""
        return Activation(self.scope, dict(self.counts))


class _Module(weakref.ref):  # type: ignore[type-arg]
    """A module under a root: its scope, and the module that holds it by a name (None if none)."""

    __slots__ = ("key", "name", "owner", "root", "scope")

    root: _Root
    key: Hashable
    scope: Scope
    owner: _Module | None
    name: str


class _Numbers:
    """The numbers of names that are taken."""

    def __init__(self) -> None:
        #: Name -> a number below which all are taken, so that they are not tried again.
        self._lowest: dict[str, int] = {}

    def unused(self, name: str, is_taken: Callable[[str], bool]) -> str:
        """Return the name, with the lowest possible number where it is taken."""
        number = self._lowest.get(name, 1)
        while is_taken(found := f"{name}#{number}" if number > 1 else name):
            number += 1
        self._lowest[name] = number
        return found

    def free(self, found: str) -> None:
        """Make a name available again."""
        name, _, number = found.rpartition("#")
        for one, lowest in ((found, 1), (name, int(number) if number.isdecimal() else 1)):
            if self._lowest.get(one, 0) > lowest:
                self._lowest[one] = lowest


class _Root:
    def __init__(self, module: Any, label: str) -> None:
        self.label, self.module = label, weakref.ref(module)
        #: The id of a module, or that of the calling scope and the module's -> the module.
        self.modules: dict[Hashable, _Module] = {}
        #: Those of them that another one holds.
        self.held: dict[Hashable, _Module] = {}
        #: Path -> the one of the others that has it, and the numbers of these paths.
        self.others: dict[str, _Module] = {}
        self.numbers = _Numbers()
        #: Path -> the module that was last found there.
        self.found: dict[str, _Module] = {}
        #: Weight -> its name when weights were last listed.
        self.weights: Known[str] = Known()

    def is_taken(self, path: str) -> bool:
        """Return True if a module that no other one holds has this path."""
        known = self.others.get(path)
        return known is not None and self.modules.get(known.key) is known


class Scopes:
    """The scopes of one store. They resume with its contexts, so that names do not change.

    Args:
        children_of: Returns the modules that a module holds, by name. A value may be None.
        weights_of: Returns the weights of a module and of those under it: the qualified name of
            each, the module that holds it, and the weight.
        name_of: Returns the name that a module itself has, in frameworks where each has one. Then a
            path consists of the names of the calls that lead to the module, from the root on, and
            `children_of` is not used. Such frameworks number the names, so a path is dropped with
            its module: otherwise a program that makes its modules again and again would make
            endless paths.
        holder_of: Returns the module that holds a module and whose method is running, or None. It
            is asked when an outermost module is called for the first time.
        wraps: Returns the name of the module that a module only wraps, or an empty string. A
            driver does not `enter` a wrapper, and paths do not name it.
        class_of: Returns the name of a module's class.

    Attributes:
        held_by: Label of a root -> that of the root whose method called it first, and holds it.
        dead: Labels of roots that have died, and paths that have got another module, since
            `take_dead`.
    """

    def __init__(
        self,
        children_of: Callable[[Any], Mapping[str, Any]],
        weights_of: Callable[[Any], Iterable[tuple[str, Any, Any]]],
        name_of: Callable[[Any], str] | None = None,
        holder_of: Callable[[Any], Any] = lambda module: None,
        wraps: Callable[[Any], str] = lambda module: "",
        class_of: Callable[[Any], str] = lambda module: type(module).__qualname__,
    ) -> None:
        self._children_of, self._weights_of, self._name_of = children_of, weights_of, name_of
        self._holder_of = holder_of
        self._wraps, self._class_of = wraps, class_of
        #: Held while modules are found, since threads share the scopes of a tool.
        self._lock = threading.RLock()
        self._forget = partial(_forget, weakref.ref(self))
        self._roots: Known[_Root] = Known(self._root_died)
        self._by_label: dict[str, _Root] = {}
        self._labels: set[str] = set()
        self._label_numbers = _Numbers()
        self._numbers: dict[tuple[str, str], int] = {}
        #: The number of a place -> zone -> the scope of the place in that zone.
        self._zoned: dict[int, dict[str, Scope]] = {}
        self._count = itertools.count(1)
        self.dead: list[tuple[str, str | None]] = []
        self.held_by: dict[str, str] = {}

    def enter(self, module: Any, parent: Scope | None, again: bool) -> Scope:
        """Return the scope of a call of `module`.

        Args:
            module: The module called.
            parent: The innermost scope around it, or None.
            again: Whether this runs inside a backward pass, where a part of a known model may be
                called by itself to recompute it.
        """
        if parent is not None and parent.zone:
            return self.zoned(self.enter(module, parent.around, again), parent.zone)
        if parent is not None and parent.root:
            # If the root has died during its own call, its modules belong to the calling scope.
            around = self._by_label.get(parent.root)
            return self._scope(around, module, parent) if around is not None else parent
        if again and (known := self.known(module)) is not None:
            return known
        return self._scope(self._root(module), module, OUTSIDE)

    def known(self, module: Any, around: Scope | None = None) -> Scope | None:
        """Return the scope of a module of a root that was called; None if there is none.

        Args:
            module: The module.
            around: A scope whose root is looked at first.
        """
        first = self._by_label.get(around.root) if around is not None else None
        # Of a list: a module that is collected meanwhile removes itself.
        for root in (first, *list(self._by_label.values())):
            found = root.modules.get(id(module)) if root is not None else None
            if found is not None and found() is module:
                return found.scope
        return None

    def zoned(self, scope: Scope, zone: str) -> Scope:
        """Return the scope of the same place in a zone, whose ops have an identity of their own."""
        place = scope if scope.around is None else scope.around
        zones = self._zoned.setdefault(place.number, {})
        found = zones.get(zone)
        if found is None:
            found = zones[zone] = Scope(next(self._count), place.root, place.path, zone, place)
        return found

    def holders(self, module: Any, scope: Scope, parent: Scope | None) -> list[tuple[Any, str]]:
        """Return the owners of `module`, which was just entered as `scope`, with its names there.

        Further pairs lead outwards, up to the module of the scope `parent`, or to the root. The
        list is empty for a root and for a module that no other module holds.
        """
        found: list[tuple[Any, str]] = []
        root = self._by_label.get(scope.root)
        known = root.modules.get(id(module)) if root is not None else None
        while known is not None and known.owner is not None:
            if (owner := known.owner()) is None:
                break
            found += self._way(owner, known.name, known()) or [(owner, known.name)]
            known = known.owner
            if parent is not None and known.scope.path == parent.path:
                break
        return found

    def around(self, scope: Scope) -> Iterator[Any]:
        """Yield the module of a scope, and from it outwards those that hold it."""
        root = self._by_label.get(scope.root)
        known: Any = root and (root.found.get(scope.path) or root.others.get(scope.path))
        while known is not None:
            if (module := known()) is not None:
                yield module
            known = known.owner

    def held(self, root: str) -> list[str]:
        """Return the paths of the modules that a root holds, whether or not they were called."""
        found = self._by_label.get(root)
        known = list(found.modules.values()) if found is not None else []
        return [one.scope.path for one in known if one.owner is not None]

    def classes(self, *roots: str) -> dict[str, str]:
        """Return the name of the class of each module by its path, called or not.

        Args:
            roots: Labels of roots; all of them if none is given.
        """
        chosen = [self._by_label.get(root) for root in roots or list(self._by_label)]
        known = [one for root in chosen if root is not None for one in root.modules.copy().values()]
        named = [(one.scope.path, one()) for one in known]
        return {path: self._class_of(one) for path, one in named if one is not None}

    def class_at(self, root: str, path: str) -> str | None:
        """Return the name of the class of a module that no other one holds, else None.

        There is one more at each call of a module in a plain list. To list `classes` for each of
        them would take the square of their number.
        """
        held = self._by_label.get(root)
        known = held.others.get(path) if held is not None else None
        module = known() if known is not None else None
        return None if module is None else self._class_of(module)

    def weight_name(self, scope: Scope, weight: Any) -> str | None:
        """Return the qualified name of a weight in the root that `scope` belongs to, or None."""
        root = self._by_label.get(scope.root)
        if root is None:
            return None
        name = root.weights.get(weight)
        if name is None and self.weights(scope.root):
            name = root.weights.get(weight)
        return name

    def weights(self, root: str) -> list[tuple[str, Any, Any]]:
        """Return the weights of a root: the qualified name of each, its module, the weight."""
        held = self._by_label.get(root)
        if held is None or (module := held.module()) is None:
            return []
        found = list(self._weights_of(module))
        weights: Known[str] = Known()
        for name, _, weight in found:
            weights.set(weight, name)
        held.weights = weights  # At once, since another thread may look meanwhile.
        return found

    def roots(self) -> list[Any]:
        """Return the outermost modules that have been called and are alive."""
        return [module for module, _ in self._roots.items()]

    def root(self, label: str) -> Any:
        """Return the outermost module of a label; None if it has died."""
        held = self._by_label.get(label)
        return None if held is None else held.module()

    def take_dead(self) -> list[tuple[str, str | None]]:
        """Return what has died: (root, None) for a root, (root, path) for a path.

        A path has died when it has a new module or, in frameworks whose modules have names, none.

        The contexts of the ops there can be dropped, and then the labels of the roots.
        """
        dead, self.dead = self.dead, []
        return dead

    def free(self, labels: Iterable[str]) -> None:
        """Make labels available to new roots."""
        for label in labels:
            self._labels.discard(label)
            self._label_numbers.free(label)

    def _root(self, module: Any) -> _Root:
        root = self._roots.get(module)
        if root is None:
            with self._lock:
                return self._roots.get(module) or self._new_root(module)
        return root

    def _new_root(self, module: Any) -> _Root:
        name = self._class_of(module) if self._name_of is None else self._name_of(module)
        label = self._label_numbers.unused(name, self._labels.__contains__)
        self._labels.add(label)
        root = self._by_label[label] = _Root(module, label)
        self._roots.set(module, root)
        if (holder := self._holder_of(module)) is not None:
            self.held_by[label] = self._root(holder).label
        return root

    def _root_died(self, root: _Root) -> None:
        del self._by_label[root.label]
        self.held_by.pop(root.label, None)
        for known in list(root.modules.values()):
            self._path_died(root.label, known.scope.path)
        root.modules.clear()
        root.held.clear()
        root.others.clear()
        self.dead.append((root.label, None))

    def _path_died(self, label: str, path: str) -> None:
        self.dead.append((label, path))
        number = self._numbers.pop((label, path), None)
        if number is not None:
            self._zoned.pop(number, None)

    def _scope(self, root: _Root, module: Any, above: Scope) -> Scope:
        """Return the scope of a module called in the scope `above` under a root."""
        key = id(module) if self._name_of is None else (above.number, id(module))
        known = root.modules.get(key)
        if known is not None and known() is module and self._in_place(known, above):
            return known.scope
        with self._lock:
            return self._found(root, key, module, above)

    def _found(self, root: _Root, key: Hashable, module: Any, above: Scope) -> Scope:
        """Return the scope of a module that is new, or no longer where it was."""
        if self._name_of is None:
            self._register(root)
            known = root.modules.get(key)
            if known is not None and known() is module:
                return known.scope
            # The module is not registered under its root: it is in a plain list, or was made in the
            # call. It is numbered by first call. The number is free again when it has died.
            path = f"{above.path}." * bool(above.path) + f"<{self._class_of(module)}>"
        else:
            path = f"{above.path}/{self._name_of(module)}" if above.root else root.label
        path = root.numbers.unused(path, root.is_taken)
        return self._add(root, key, module, path, None, "").scope

    def _in_place(self, known: _Module, above: Scope) -> bool:
        """Return True if a module is still held where it was found, up to the calling module or the
        root.
        """
        while known.owner is not None and known.scope is not above:
            owner = known.owner()
            if owner is None or self._way(owner, known.name, known()) is None:
                return False
            known = known.owner
        return True

    def _way(self, owner: Any, name: str, module: Any) -> list[tuple[Any, str]] | None:
        """Return the owner and name of a module, and before it those of its wrappers, from it
        outwards; None if it is not there.
        """
        way, child = [(owner, name)], self._children_of(owner).get(name)
        while child is not module:
            wrapped = "" if child is None else self._wraps(child)
            if not wrapped:
                return None
            way.insert(0, (child, wrapped))
            child = self._children_of(child).get(wrapped)
        return way

    def _register(self, root: _Root) -> None:
        """Find the paths of all modules that the root holds now."""
        top = root.module()
        if top is None:
            return
        before, root.held = root.held, {}
        for key, known in before.items():
            if root.modules.get(key) is known:
                root.modules.pop(key, None)
        waiting, seen = [(top, self._add(root, id(top), top, "", None, ""))], {id(top)}
        while waiting:
            module, owner = waiting.pop()
            for name, held in self._children_of(module).items():
                child = held
                while child is not None and (wrapped := self._wraps(child)):
                    child = self._children_of(child).get(wrapped)
                if child is None or id(child) in seen:
                    continue
                seen.add(id(child))
                path = f"{owner.scope.path}.{name}" if owner.scope.path else name
                last = root.found.get(path)
                if last is not None and last() is not child:
                    self._path_died(root.label, path)
                known = self._add(root, id(child), child, path, owner, name)
                root.found[path] = known
                waiting.append((child, known))

    def _add(
        self, root: _Root, key: Hashable, module: Any, path: str, owner: _Module | None, name: str
    ) -> _Module:
        # By path, so that a module that is made again in each iteration keeps its sites.
        number = self._numbers.setdefault((root.label, path), next(self._count))
        known = _Module(module, self._forget)
        known.root, known.key, known.owner, known.name = root, key, owner, name
        known.scope = Scope(number, root.label, path)
        if owner is not None:
            root.held[key] = known
        else:
            root.others[path] = known
        before = root.modules.get(key)
        root.modules[key] = known  # Now other threads may find it.
        if before is not None:
            _free(before)
        return known


def _forget(
    held: Callable[[], Scopes | None], dead: _Module, ends: Callable[[], bool] = sys.is_finalizing
) -> None:
    if ends():
        return  # The interpreter has taken the names of this module away.
    scopes, modules = held(), dead.root.modules
    if modules.get(dead.key) is dead:
        del modules[dead.key]
        _free(dead)
        if scopes is not None and scopes._name_of is not None:
            scopes._path_died(dead.scope.root, dead.scope.path)


def _free(known: _Module) -> None:
    """Make the path available that a module had which no other one held."""
    path, root = known.scope.path, known.root
    if known.owner is None and root.others.get(path) is known:
        del root.others[path]
        root.numbers.free(path)


class Labels:
    """Numbers for tensors that distinguish ops (weights outside of any module), by first use.

    A number is free again when its tensor has died. So a program that makes its weights again in
    every iteration keeps its ops.

    Args:
        token_of: Returns the token of a tensor in frameworks whose tensors carry one, so that
            native code finds it at every operator. It is above 0 for weights and below 0 for
            others, and is never used again.
    """

    def __init__(self, token_of: Callable[[Any], int] | None = None) -> None:
        self._token_of = token_of
        self._lock = threading.RLock()
        #: Tensor -> its token and number.
        self._known: Known[tuple[int, int]] = Known(self._forgotten)
        #: Token -> the ``id()`` of its tensor.
        self._places: dict[int, int] = {}
        #: Numbers that are free again, as a heap, and how many there were.
        self._free: list[int] = []
        self._made, self._tokens = itertools.count(), itertools.count(1)
        #: What `take_dead` returns.
        self.dead: list[int] = []

    def look_up(self, tensor: Any) -> tuple[int, int]:
        """Return the tensor's token, which is unique in this process, and its number."""
        known = self._known.get(tensor)
        if known is None:
            with self._lock:
                known = self._known.get(tensor) or self._add(tensor)
        return known

    def _add(self, tensor: Any) -> tuple[int, int]:
        number = heapq.heappop(self._free) if self._free else next(self._made)
        token = next(self._tokens) if self._token_of is None else self._token_of(tensor)
        known = token, number
        if self._known.set(tensor, known):
            self._places[token] = id(tensor)
        return known

    def tensor(self, token: int) -> Any:
        """Return the tensor that `look_up` gave a token for, None if it is gone."""
        tensor = self._known.value(self._places.get(token, 0))
        known = None if tensor is None else self._known.get(tensor)
        return tensor if known is not None and known[0] == token else None

    def take_dead(self) -> set[int]:
        """Return the tokens of tensors that are gone."""
        dead, self.dead = self.dead, []
        return set(dead)

    def _forgotten(self, known: tuple[int, int]) -> None:
        token, number = known
        self._places.pop(token, None)
        heapq.heappush(self._free, number)
        self.dead.append(token)
