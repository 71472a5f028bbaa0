"""Layer scopes: which Keras layer runs, by what path, and how often a site was passed in it.

Owns the names of roots (outermost layers called, numbered by first call where they share a name),
of the layers called inside them, and of variables. Holds all of them weakly.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

__all__ = ["OPTIMIZER", "OUTSIDE", "Activation", "Labels", "Scope", "Scopes"]

# Of the whole process: a tensor may be seen by the sessions of two threads.
_TOKENS = itertools.count(1)


class Scope:
    """One layer as seen from its root; `number` tells scopes apart within this process.

    Attributes:
        root: Label of the outermost layer; empty outside any layer.
        path: The names of the layers from the root on, joined by ``/``.
        call: Code of the layer's own `call`, at which its call sites may end.
    """

    __slots__ = ("call", "first", "number", "path", "root", "zone")

    def __init__(
        self, number: int, root: str, path: str, call: CodeType | None = None, zone: str = ""
    ) -> None:
        self.number, self.root, self.path, self.call, self.zone = number, root, path, call, zone
        #: The record that the last activation began with; for a short cut only.
        self.first: Any = None


#: Ops outside any layer.
OUTSIDE = Scope(0, "", "")
#: Ops of an optimizer: a variable that it reads is none of the model's reads.
OPTIMIZER = Scope(1, "", "", zone="optimizer")


class Activation:
    """One call of a layer: its scope, and how often each site was passed during the call."""

    __slots__ = ("counts", "last", "scope")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.counts: dict[Any, int] = {}
        #: Record of the op that ran last in it.
        self.last: Any = None


class _Known:
    """A layer under a root (or a root): its scope and, of a root, the names of its variables."""

    __slots__ = ("layer", "scope", "variables")

    def __init__(self, layer: weakref.ref[Any], scope: Scope) -> None:
        self.layer, self.scope = layer, scope
        self.variables: dict[int, tuple[weakref.ref[Any], str]] = {}


class Scopes:
    """The scopes of one store; resumes with its contexts, so that names stay what they were."""

    def __init__(self) -> None:
        #: (number of the parent's scope, id of the layer) -> the layer there.
        self._known: dict[tuple[int, int], _Known] = {}
        self._roots: dict[str, _Known] = {}
        self._paths: set[str] = set()
        self._numbers = itertools.count(2)
        self._dead: list[str] = []

    def enter(self, layer: Any, parent: Activation | None) -> Activation:
        """The activation of a call of `layer` inside that of `parent`."""
        above = OUTSIDE if parent is None or not parent.scope.root else parent.scope
        known = self._known.get((above.number, id(layer)))
        if known is None or known.layer() is not layer:
            known = self._add(layer, above)
        return Activation(known.scope)

    def variable_name(self, scope: Scope, handle: Any) -> str | None:
        """Path of a variable of the root that `scope` belongs to, or None."""
        root = self._roots.get(scope.root)
        layer = root.layer() if root is not None else None
        if root is None or layer is None:
            return None
        known = root.variables.get(id(handle))
        if known is None or known[0]() is not handle:
            root.variables = {
                id(held): (weakref.ref(held), name) for held, name in _variables(layer)
            }
            known = root.variables.get(id(handle))
        return known[1] if known is not None and known[0]() is handle else None

    @property
    def changed(self) -> bool:
        """Whether `take_dead` has something to give."""
        return bool(self._dead)

    def take_dead(self) -> list[str]:
        """Paths of layers that are gone; what tools know of the ops there can go, too."""
        dead, self._dead = self._dead, []
        self._paths.difference_update(dead)
        return dead

    def _add(self, layer: Any, above: Scope) -> _Known:
        base = f"{above.path}/{layer.name}" if above.root else str(layer.name)
        path = base
        for number in itertools.count(2):
            if path not in self._paths:
                break
            path = f"{base}#{number}"
        self._paths.add(path)
        number = next(self._numbers)
        call = getattr(getattr(type(layer), "call", None), "__code__", None)
        scope = Scope(number, above.root or path, path, call)
        key = (above.number, id(layer))
        known = _Known(weakref.ref(layer, self._forgetting(key, path)), scope)
        self._known[key] = known
        if not above.root:
            self._roots[path] = known
        return known

    def _forgetting(self, key: tuple[int, int], path: str) -> Callable[[weakref.ref[Any]], None]:
        held = weakref.ref(self)

        def forget(dead: weakref.ref[Any]) -> None:
            scopes = held()
            if scopes is None:
                return
            known = scopes._known.get(key)
            if known is not None and known.layer is dead:
                del scopes._known[key]
            root = scopes._roots.get(path)
            if root is not None and root.layer is dead:
                del scopes._roots[path]
            scopes._dead.append(path)

        return forget


def _variables(layer: Any) -> Iterator[tuple[Any, str]]:
    """Handles of a layer's variables, with their paths."""
    for variable in layer.variables:
        held = getattr(getattr(variable, "_value", variable), "_handle", None)
        if held is not None:
            yield held, str(variable.path)


class Labels:
    """Numbers for tensors that tell ops apart (handles of variables, watched tensors).

    Given by first use; a number is free again once its tensor is gone, so that a program that makes
    its weights anew in every iteration does not make its ops anew.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._taken: set[int] = set()
        self._dead: list[int] = []

    def token(self, tensor: Any) -> int:
        """A number above 0 that is never given again in this process."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        return self._add(tensor)[0]

    def number(self, tensor: Any) -> int:
        """The tensor's number among those alive, from 0."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[2]
        return self._add(tensor)[1]

    def find(self, token: int) -> Any:
        """The tensor of a token, or None."""
        for reference, known, _ in tuple(self._known.values()):
            if known == token:
                return reference()
        return None

    def unmark(self) -> None:
        """Take the marks of this session off tensors that live on."""
        for reference, _, _ in tuple(self._known.values()):
            tensor = reference()
            if tensor is not None:
                vars(tensor).pop("_amanda_source", None)

    def take_dead(self) -> list[int]:
        """Tokens of tensors that are gone."""
        dead, self._dead = self._dead, []
        return dead

    @property
    def changed(self) -> bool:
        """Whether `take_dead` has something to give."""
        return bool(self._dead)

    def _add(self, tensor: Any) -> tuple[int, int]:
        number = 0
        while number in self._taken:
            number += 1
        self._taken.add(number)
        token, key = next(_TOKENS), id(tensor)
        held = weakref.ref(self)

        def forget(dead: weakref.ref[Any]) -> None:
            labels = held()
            if labels is None:
                return
            known = labels._known.get(key)
            if known is not None and known[0] is dead:
                del labels._known[key]
            labels._taken.discard(number)
            labels._dead.append(token)

        self._known[key] = (weakref.ref(tensor, forget), token, number)
        return token, number
