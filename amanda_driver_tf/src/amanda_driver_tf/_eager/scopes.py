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

from amanda_driver_tf._tensorflow_internals.objects import handle_in_layer

__all__ = ["OPTIMIZER", "OUTSIDE", "TOKENS", "Activation", "Labels", "Scope", "Scopes"]


class Scope:
    """One layer as seen from its root; `number` tells scopes apart within this process.

    Attributes:
        root: Label of the outermost layer; empty outside any layer.
        path: The names of the layers from the root on, joined by ``/``.
        call: Code of the layer's own `call`, at which its call sites may end.
    """

    __slots__ = ("call", "number", "path", "root", "zone")

    def __init__(
        self, number: int, root: str, path: str, call: CodeType | None = None, zone: str = ""
    ) -> None:
        self.number, self.root, self.path, self.call, self.zone = number, root, path, call, zone


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

    def copy(self) -> Activation:
        """The activation as it stands, to be resumed by a recomputation."""
        other = Activation(self.scope)
        other.counts = dict(self.counts)
        return other


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
        #: Paths of layers that are gone, for `take_dead`.
        self.dead: list[str] = []

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

    def take_dead(self) -> list[str]:
        """Paths of layers that are gone; what tools know of the ops there can go, too."""
        dead, self.dead = self.dead, []
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
            scopes.dead.append(path)

        return forget


def _variables(layer: Any) -> Iterator[tuple[Any, str]]:
    """Handles of a layer's variables, with their paths."""
    for variable in layer.variables:
        held = handle_in_layer(variable)
        if held is not None:
            # Of tf_keras they are TensorFlow's own.
            yield held, str(getattr(variable, "path", variable.name))


class _Tokens:
    """Numbers of tensors (handles of variables, watched tensors), the same in all sessions.

    A tensor carries its own, so that finding it costs no more than an attribute.
    """

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._known: dict[int, weakref.ref[Any]] = {}
        #: How many tensors with a token have died.
        self.deaths = 0

    def of(self, tensor: Any) -> int:
        """A number above 0 that is never given again in this process."""
        source = tensor._amanda_source
        if source.__class__ is int and source:
            return abs(source)
        token = next(self._next)
        known = self._known

        def forget(_: weakref.ref[Any]) -> None:
            known.pop(token, None)
            self.deaths += 1

        known[token] = weakref.ref(tensor, forget)
        tensor._amanda_source = token
        return token

    def find(self, token: int) -> Any:
        """The tensor of a token, or None."""
        reference = self._known.get(token)
        return reference() if reference is not None else None

    def release(self) -> None:
        """Take the tokens off all tensors that live on."""
        for reference in tuple(self._known.values()):
            tensor = reference()
            if tensor is not None:
                vars(tensor).pop("_amanda_source", None)
        self._known.clear()
        self.deaths += 1


TOKENS = _Tokens()


class Labels:
    """Numbers for tensors that tell ops apart where they have no name.

    Given by first use in a session; a number is free again once its tensor is gone, so that a
    program that makes its weights anew in every iteration does not make its ops anew.
    """

    def __init__(self) -> None:
        #: id of a tensor -> the tensor, its token then, and its number.
        self._known: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._deaths = -1

    def number(self, tensor: Any) -> int:
        """The tensor's number among those alive, from 0."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            # A tensor itself may not be asked whether it is true.
            alive = (known for known in self._known.values() if known[0]() is not None)
            taken = {number for _, _, number in alive}
            number = next(number for number in itertools.count() if number not in taken)
            known = (weakref.ref(tensor), TOKENS.of(tensor), number)
            self._known[id(tensor)] = known
        return known[2]

    @property
    def changed(self) -> bool:
        """Whether tensors with tokens have died since `take_dead`."""
        return self._deaths != TOKENS.deaths

    def take_dead(self) -> None:
        """Forget the tensors that are gone."""
        self._deaths = TOKENS.deaths
        self._known = {key: known for key, known in self._known.items() if known[0]() is not None}
