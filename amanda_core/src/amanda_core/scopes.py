"""Scopes: the paths of the modules of a model, and the names of their weights.

Owns the names of roots (outermost modules called, numbered by first call), of the modules and
weights under them, and numbers for weights outside of any module. The driver reports what a module
holds. Without modules, all ops are `OUTSIDE`. Modules and weights are held weakly.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from amanda_core.weak import Known

__all__ = ["OUTSIDE", "Activation", "Labels", "Scope", "Scopes"]


class Scope:
    """A module under its root; `number` is unique in this process.

    Attributes:
        root: Label of the outermost module; empty outside of any module.
        path: Path of the module.
        zone: Part of the program to which all of its ops belong; empty if they differ.
    """

    __slots__ = ("number", "path", "root", "zone")

    def __init__(self, number: int, root: str, path: str, zone: str = "") -> None:
        self.number, self.root, self.path, self.zone = number, root, path, zone


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


class _Known(NamedTuple):
    """A module under a root: its scope, and the owner that holds it (None if there is none)."""

    module: weakref.ref[Any]
    scope: Scope
    owner: weakref.ref[Any] | None
    name: str


class _Root:
    def __init__(self, module: Any, label: str, forget: Callable[[weakref.ref[Any]], None]) -> None:
        self.label = label
        self.module = weakref.ref(module, forget)
        self.paths: dict[int, _Known] = {}
        #: Path -> the module that was last found there.
        self.holders: dict[str, weakref.ref[Any]] = {}
        #: Weight -> its name when weights were last listed.
        self.weights: Known[str] = Known()


class Scopes:
    """The scopes of one store. They resume with its contexts, so that names do not change.

    Args:
        children_of: Returns the modules that a module holds, by name. A value may be None.
        weights_of: Returns the weights of a module and of those under it, with qualified names.
        name_of: Returns the name that a module itself has, in frameworks where each has one. Then a
            path consists of the names of the calls that lead to the module, from the root on, and
            `children_of` is not used. Such frameworks number the names, so a path is dropped with
            its module: otherwise a program that makes its modules again and again would make
            endless paths.

    Attributes:
        dead: Labels of roots that have died, and paths that have got another module, since
            `take_dead`.
    """

    def __init__(
        self,
        children_of: Callable[[Any], Mapping[str, Any]],
        weights_of: Callable[[Any], Iterable[tuple[str, Any]]],
        name_of: Callable[[Any], str] | None = None,
    ) -> None:
        self._children_of, self._weights_of, self._name_of = children_of, weights_of, name_of
        self._roots: dict[int, _Root] = {}
        self._by_label: dict[str, _Root] = {}
        #: Number of the calling scope and id of a module with a name of its own -> that module.
        self._named: dict[tuple[int, int], _Known] = {}
        self._labels: set[str] = set()
        self._numbers: dict[tuple[str, str], int] = {}
        self._count = itertools.count(1)
        self.dead: list[tuple[str, str | None]] = []

    def enter(self, module: Any, parent: Scope | None, again: bool) -> Scope:
        """Return the scope of a call of `module`.

        Args:
            module: The module called.
            parent: The innermost scope around it, or None.
            again: Whether this runs inside a backward pass, where a part of a known model may be
                called by itself to recompute it.
        """
        above = parent if parent is not None and parent.root else OUTSIDE
        named = self._named.get((above.number, id(module)))
        if named is not None and named.module() is module:
            return named.scope
        if above is not OUTSIDE:
            root = self._by_label.get(above.root)
            if root is None:
                return above  # The root has died during its own call.
        else:
            if again:
                for root in self._roots.values():
                    known = root.paths.get(id(module))
                    if known is not None and known.module() is module:
                        return known.scope
            root = self._root(module)
        if self._name_of is not None:
            return self._called(root, module, above, self._name_of(module))
        return self._path(root, module, above.path)

    def holders(self, module: Any, scope: Scope, parent: Scope | None) -> list[tuple[Any, str]]:
        """Return the owners of `module`, which was just entered as `scope`, with its names there.

        Further pairs lead outwards, up to the module of the scope `parent`, or to the root. The
        list is empty for a root and for a module that no other module holds.
        """
        found: list[tuple[Any, str]] = []
        root = self._by_label.get(scope.root)
        known = root.paths.get(id(module)) if root is not None else None
        while root is not None and known is not None and known.owner is not None:
            owner = known.owner()
            if owner is None:
                break
            found.append((owner, known.name))
            known = root.paths.get(id(owner))
            if known is not None and parent is not None and known.scope.path == parent.path:
                break
        return found

    def weight_name(self, scope: Scope, weight: Any) -> str | None:
        """Return the qualified name of a weight in the root that `scope` belongs to, or None."""
        root = self._by_label.get(scope.root)
        if root is None:
            return None
        known = root.weights.get(weight)
        module = root.module()
        if known is None and module is not None:
            root.weights.clear()
            for name, each in self._weights_of(module):
                root.weights.set(each, name)
            known = root.weights.get(weight)
        return known

    def weights(self, root: str) -> Iterator[tuple[str, Any, Any]]:
        """Yield each weight of a root: its qualified name, the module that holds it, the weight."""
        held = self._by_label.get(root)
        module = held.module() if held is not None else None
        for name, weight in self._weights_of(module) if module is not None else ():
            yield name, self._owner(module, name), weight

    def _owner(self, module: Any, name: str) -> Any:
        """Return the module that holds the weight called `name` under `module`."""
        for part, child in self._children_of(module).items():
            # Do not split at dots, because a module's own name may have some.
            if child is not None and name.startswith(f"{part}."):
                return self._owner(child, name[len(part) + 1 :])
        return module

    def roots(self) -> list[Any]:
        """Return the outermost modules that have been called and are alive."""
        modules = [root.module() for root in self._roots.values()]
        return [module for module in modules if module is not None]

    def take_dead(self) -> list[tuple[str, str | None]]:
        """Return what has died: (root, None) for a root, (root, path) for a path.

        A path has died when it has a new module or, in frameworks whose modules have names, none.

        The contexts of the ops there can be dropped, and then the labels of the roots.
        """
        dead, self.dead = self.dead, []
        return dead

    def free(self, labels: Iterable[str]) -> None:
        """Make labels available to new roots."""
        self._labels.difference_update(labels)

    def _root(self, module: Any) -> _Root:
        root = self._roots.get(id(module))
        if root is not None and root.module() is module:
            return root
        name = type(module).__qualname__ if self._name_of is None else self._name_of(module)
        label = _unused(name, self._labels)
        self._labels.add(label)
        root = _Root(module, label, self._forgetting(id(module), label))
        self._roots[id(module)] = self._by_label[label] = root
        return root

    def _forgetting(self, key: int, label: str) -> Callable[[weakref.ref[Any]], None]:
        held = weakref.ref(self)

        def forget(dead: weakref.ref[Any]) -> None:
            scopes = held()
            if scopes is not None:
                root = scopes._by_label.pop(label)
                if scopes._roots.get(key) is root:
                    del scopes._roots[key]
                for called, known in tuple(scopes._named.items()):
                    if known.scope.root == label:
                        del scopes._named[called]
                        scopes.dead.append((label, known.scope.path))
                scopes.dead.append((label, None))

        return forget

    def _path(self, root: _Root, module: Any, parent: str) -> Scope:
        known = root.paths.get(id(module))
        if known is not None and known.module() is module and self._in_place(root, module):
            return known.scope
        self._register(root)
        known = root.paths.get(id(module))
        if known is not None and known.module() is module:
            return known.scope
        # The module is not registered under its root: it is in a plain list, or was made in the
        # call. It is numbered by first call. The number is free again when the module has died.
        name = f"{parent}." * bool(parent) + f"<{type(module).__qualname__}>"
        taken = {known.scope.path for known in root.paths.values()}
        return self._add(root, module, _unused(name, taken), None, "")

    def _called(self, root: _Root, module: Any, above: Scope, name: str) -> Scope:
        """Return the scope of a module with a name of its own that was not called there before."""
        path = root.label
        if above.root:
            path = _unused(f"{above.path}/{name}", root.holders)
        scope = Scope(next(self._count), root.label, path)
        key, held = (above.number, id(module)), weakref.ref(self)

        def forget(dead: weakref.ref[Any]) -> None:
            del root.holders[path]
            scopes = held()
            if scopes is not None and scopes._named.get(key) is known:
                del scopes._named[key]
                scopes.dead.append((root.label, path))

        root.holders[path] = weakref.ref(module, forget)
        known = self._named[key] = _Known(root.holders[path], scope, None, name)
        return scope

    def _in_place(self, root: _Root, module: Any) -> bool:
        """Return True if a module is still held where it was found, all the way up to the root."""
        while True:
            known = root.paths.get(id(module))
            if known is None:
                return False
            if known.owner is None:
                return True
            owner = known.owner()
            if owner is None or self._children_of(owner).get(known.name) is not module:
                return False
            module = owner

    def _register(self, root: _Root) -> None:
        """Find the paths of all modules that the root holds now."""
        top = root.module()
        if top is None:
            return
        for key in [key for key, known in root.paths.items() if known.owner is not None]:
            del root.paths[key]
        self._add(root, top, "", None, "")
        waiting, seen = [(top, "")], {id(top)}
        while waiting:
            owner, prefix = waiting.pop()
            for name, child in self._children_of(owner).items():
                if child is None or id(child) in seen:
                    continue
                seen.add(id(child))
                path = f"{prefix}.{name}" if prefix else name
                held = root.holders.get(path)
                if held is not None and held() is not child:
                    self.dead.append((root.label, path))
                root.holders[path] = weakref.ref(child)
                self._add(root, child, path, weakref.ref(owner), name)
                waiting.append((child, path))

    def _add(
        self, root: _Root, module: Any, path: str, owner: weakref.ref[Any] | None, name: str
    ) -> Scope:
        # By path, so that a module that is made again in each iteration keeps its sites.
        number = self._numbers.setdefault((root.label, path), next(self._count))
        scope = Scope(number, root.label, path)
        paths, key = root.paths, id(module)

        def forget(dead: weakref.ref[Any]) -> None:
            if key in paths and paths[key].module is dead:
                del paths[key]

        paths[key] = _Known(weakref.ref(module, forget), scope, owner, name)
        return scope


class Labels:
    """Numbers for tensors that distinguish ops (weights outside of any module), by first use.

    A number is free again when its tensor has died. So a program that makes its weights again in
    every iteration keeps its ops.

    Args:
        weight_types: Types of tensors that are always weights.
        token_of: Returns the token of a tensor in frameworks whose tensors carry one, so that
            native code finds it at every operator. It is above 0 for weights and below 0 for
            others, and is never used again.
    """

    def __init__(
        self, weight_types: tuple[type, ...], token_of: Callable[[Any], int] | None = None
    ) -> None:
        self._weight_types, self._token_of = weight_types, token_of
        #: Tensor -> its token, its number, and whether it is of a weight type.
        self._known: Known[tuple[int, int, bool]] = Known(self._forgotten)
        self._taken: set[int] = set()
        self._tokens = 0
        self._dead: list[tuple[int, bool]] = []

    def look_up(self, tensor: Any) -> tuple[int, int]:
        """Return the tensor's token, which is unique in this process, and its number."""
        known = self._known.get(tensor)
        if known is not None:
            return known[0], known[1]
        number = 0
        while number in self._taken:
            number += 1
        self._taken.add(number)
        if self._token_of is not None:
            token = self._token_of(tensor)
            weight = token > 0
        else:
            token = self._tokens = self._tokens + 1
            weight = isinstance(tensor, self._weight_types)
        self._known.set(tensor, (token, number, weight))
        return token, number

    def tensor(self, token: int) -> Any:
        """Return the tensor that `look_up` gave a token for, None if it is gone."""
        return next((tensor for tensor, (known, *_) in self._known.items() if known == token), None)

    def take_dead(self) -> list[tuple[int, bool]]:
        """Return the tokens of tensors that are gone, and whether they were of `weight_types`."""
        dead, self._dead = self._dead, []
        return dead

    def _forgotten(self, known: tuple[int, int, bool]) -> None:
        token, number, weight = known
        self._taken.discard(number)
        self._dead.append((token, weight))


def _unused(name: str, taken: Container[str]) -> str:
    """Return the name, with a number where it is taken."""
    numbered = (f"{name}#{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if one not in taken)
