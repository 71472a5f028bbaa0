"""Scopes: which module of a model runs, by what path, and what its weights are called.

Owns the names of roots (outermost modules called, numbered by first call), of the modules and
weights under them, and numbers for weights outside of any module. A driver says of its framework
what a module holds; where there are no modules, all ops are `OUTSIDE`. Holds modules and weights
weakly.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from amanda_core.weak import Known

__all__ = ["OUTSIDE", "Activation", "Labels", "Scope", "Scopes"]


class Scope:
    """One module as seen from its root; `number` tells scopes apart within this process."""

    __slots__ = ("number", "path", "root")

    def __init__(self, number: int, root: str, path: str) -> None:
        self.number, self.root, self.path = number, root, path


OUTSIDE = Scope(0, "", "")


class Activation:
    """One call of a module: its scope, and how often each site was passed during the call."""

    __slots__ = ("counts", "scope")

    def __init__(self, scope: Scope, counts: dict[Any, int] | None = None) -> None:
        self.scope = scope
        self.counts: dict[Any, int] = counts if counts is not None else {}

    def copy(self) -> Activation:
        """Return the activation as it stands, to be resumed by a recomputation."""
        return Activation(self.scope, dict(self.counts))


class _Known(NamedTuple):
    """A module under a root: its scope, and where its owner holds it (None if nowhere)."""

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
        #: Weight -> its name, as of when they were last listed.
        self.weights: Known[str] = Known()


class Scopes:
    """The scopes of one store; resumes with its contexts, so that names stay what they were.

    Args:
        children_of: Returns the modules that a module holds, by name; None stands for no module.
        weights_of: Returns the weights of a module and of those under it, with qualified names.

    Attributes:
        dead: Labels of roots that died, and paths that got another module, since `take_dead`.
    """

    def __init__(
        self,
        children_of: Callable[[Any], Mapping[str, Any]],
        weights_of: Callable[[Any], Iterable[tuple[str, Any]]],
    ) -> None:
        self._children_of, self._weights_of = children_of, weights_of
        self._roots: dict[int, _Root] = {}
        self._labels: set[str] = set()
        self._numbers: dict[tuple[str, str], int] = {}
        self.dead: list[tuple[str, str | None]] = []

    def enter(self, module: Any, parent: Scope | None, again: bool) -> Scope:
        """Return the scope of a call of `module`.

        Args:
            module: The module called.
            parent: The innermost scope around it, or None.
            again: Whether this runs inside a backward pass, where a part of a known model may be
                called by itself in order to recompute it.
        """
        if parent is None or not parent.root:
            if again:
                for root in self._roots.values():
                    known = root.paths.get(id(module))
                    if known is not None and known.module() is module:
                        return known.scope
            return self._path(self._root(module), module, "")
        root_label = parent.root
        for root in self._roots.values():
            if root.label == root_label:
                return self._path(root, module, parent.path)
        return parent  # The root died in the middle of its own call.

    def holders(self, module: Any, scope: Scope, parent: Scope | None) -> list[tuple[Any, str]]:
        """Return who holds `module`, which was just entered as `scope`, and by what name.

        Further pairs lead outwards: up to the module that `parent` is the scope of, else to the
        root. Empty for a root, and for a module that no other holds.
        """
        found: list[tuple[Any, str]] = []
        root = next((root for root in self._roots.values() if root.label == scope.root), None)
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
        for root in self._roots.values():
            if root.label != scope.root:
                continue
            known = root.weights.get(weight)
            module = root.module()
            if known is None and module is not None:
                root.weights.clear()
                for name, each in self._weights_of(module):
                    root.weights.set(each, name)
                known = root.weights.get(weight)
            return known
        return None

    def roots(self) -> list[Any]:
        """Return the outermost modules that have been called and are alive."""
        modules = [root.module() for root in self._roots.values()]
        return [module for module in modules if module is not None]

    def take_dead(self) -> list[tuple[str, str | None]]:
        """Return what is gone: (root, None) for a root, (root, path) for a path with a new module.

        What tools know of the ops there can go, and then the labels of the roots.
        """
        dead, self.dead = self.dead, []
        return dead

    def free(self, labels: Iterable[str]) -> None:
        """Let labels be given to new roots."""
        self._labels.difference_update(labels)

    def _root(self, module: Any) -> _Root:
        root = self._roots.get(id(module))
        if root is not None and root.module() is module:
            return root
        name = type(module).__qualname__
        label, count = name, 1
        while label in self._labels:
            count += 1
            label = f"{name}#{count}"
        self._labels.add(label)
        root = self._roots[id(module)] = _Root(module, label, self._forgetting(id(module), label))
        return root

    def _forgetting(self, key: int, label: str) -> Callable[[weakref.ref[Any]], None]:
        held = weakref.ref(self)

        def forget(dead: weakref.ref[Any]) -> None:
            scopes = held()
            if scopes is not None:
                root = scopes._roots.get(key)
                if root is not None and root.module is dead:
                    del scopes._roots[key]
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
        # Not registered under its root: kept in a plain list, or made on the fly. Numbered by first
        # call; the number is free again once the module is gone.
        name = base = f"{parent}." * bool(parent) + f"<{type(module).__qualname__}>"
        taken = {known.scope.path for known in root.paths.values()}
        for number in itertools.count(2):
            if name not in taken:
                break
            name = f"{base}#{number}"
        return self._add(root, module, name, None, "")

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
        self,
        root: _Root,
        module: Any,
        path: str,
        owner: weakref.ref[Any] | None,
        name: str,
    ) -> Scope:
        # By path: a module made anew in each iteration does not make its sites anew.
        number = self._numbers.setdefault((root.label, path), len(self._numbers) + 1)
        scope = Scope(number, root.label, path)
        paths, key = root.paths, id(module)

        def forget(dead: weakref.ref[Any]) -> None:
            if key in paths and paths[key].module is dead:
                del paths[key]

        paths[key] = _Known(weakref.ref(module, forget), scope, owner, name)
        return scope


class Labels:
    """Numbers for tensors that tell ops apart (weights outside any module), by first use.

    A number is free again once its tensor is gone, so that a program that makes its weights anew
    in every iteration does not make its ops anew.

    Args:
        weight_types: Types of tensors that are always weights.
    """

    def __init__(self, weight_types: tuple[type, ...]) -> None:
        self._weight_types = weight_types
        #: Tensor -> its token, its number, and whether it is of these types.
        self._known: Known[tuple[int, int, bool]] = Known(self._forgotten)
        self._taken: set[int] = set()
        self._tokens = 0
        self._dead: list[tuple[int, bool]] = []

    def look_up(self, tensor: Any) -> tuple[int, int]:
        """Return a token that is never given again in this process, and the tensor's number."""
        known = self._known.get(tensor)
        if known is not None:
            return known[0], known[1]
        number = 0
        while number in self._taken:
            number += 1
        self._taken.add(number)
        self._tokens += 1
        token = self._tokens
        self._known.set(tensor, (token, number, isinstance(tensor, self._weight_types)))
        return token, number

    def take_dead(self) -> list[tuple[int, bool]]:
        """Return the tokens of tensors that are gone, and whether they were of `weight_types`."""
        dead, self._dead = self._dead, []
        return dead

    def _forgotten(self, known: tuple[int, int, bool]) -> None:
        token, number, weight = known
        self._taken.discard(number)
        self._dead.append((token, weight))
