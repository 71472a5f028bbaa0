"""`Variables`: the variables that an op reads, in every mode: what `context.weights` is.

Owns the names of variables, which are the same in all modes of one process. TensorFlow's tensors
are copies, so a read variable is always whole, and slices and gathers are readers themselves.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from amanda_core.driver_kit import Found, Labels, OpContext, Place, Reads, WeakGroup, Weight
from amanda_driver_tf.tensorflow_internals.objects import (
    name_of_variable,
    shape_of_variable,
    variables_of_graph,
)

__all__ = ["REPLICAS", "VARIABLE", "Variables"]

#: Key of an execution: a function that returns what identifies the variable that a tensor of a
#: graph reads: its eager handle, or the op that holds it; None if it reads none.
VARIABLE = "variable"
#: What holds the copies of variables that further replicas of a program have, by id.
REPLICAS: dict[int, weakref.ref[Any]] = {}
#: What TensorFlow adds to the name of such a copy.
_REPLICA = re.compile(r"/replica_\d+$")
#: Ops that hand a variable's value on, and those that read its shape and no value.
_READS = frozenset({"ReadVariableOp", "Identity"})
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "VariableShape"})


class Variables:
    """The variables that ops read.

    Args:
        labels: Numbers the variables.
        eager: Returns the handle of the variable whose value an eager tensor is, or whose handle it
            is; None for others.
        named: Returns the variables of the layers that have been called: names and handles.
        classes: Returns the names of the classes of these layers by their paths.
        class_at: Returns the name of the class of the layer at a path.
    """

    def __init__(
        self,
        labels: Labels,
        eager: Callable[[Any], Any],
        named: Callable[[], Iterable[tuple[str, Any]]],
        classes: Callable[[], dict[str, str]] = dict,
        class_at: Callable[[str], str | None] = lambda path: None,
    ) -> None:
        self._labels, self._eager, self._named = labels, eager, named
        self._classes, self._class_at = classes, class_at
        #: Token of a variable -> its name, and the other way round.
        self._names: dict[int, str] = {}
        self._tokens: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        #: Name -> what holds the variable, in the first replica.
        self._holders: dict[str, weakref.ref[Any]] = {}
        self._graphs: WeakGroup[Any] = WeakGroup()

    def __call__(self, context: OpContext) -> Reads:
        """Return the variables that an op reads in this execution."""
        finder: Any = self  # It answers what `Weight` asks.
        identify: Callable[[Any], Any] = context.execution.get(VARIABLE, self._eager)
        roles: tuple[str, ...] = context.get("input_roles", ())
        found: dict[int | tuple[int, int], Weight] = {}

        def add(place: int | tuple[int, int], position: int, value: Any) -> None:
            part = self._find(value, identify(value))
            if part is not None:
                role = roles[position] if position < len(roles) else None
                # An op id never stands for two variables.
                found[place] = Weight(part, value, finder, role, False)

        for position, value in enumerate(context.get_inputs() or ()):
            if isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    add((position, index), position, item)
            else:
                add(position, position, value)
        consumed = bool(found) and context.op_type not in _READS | _SHAPES
        classes, class_at = self._classes, self._class_at
        return Reads(found, self._all, consumed, classes=classes, class_at=class_at)

    def memory(self, value: Any) -> None:
        """Return None: where a variable lies is not known."""

    def version(self, parameter: Any) -> None:
        """Return None: writes to variables are not counted."""

    def counts_writes(self, value: Any, parameter: Any) -> bool:
        """Return False, for the same reason."""
        return False

    def _all(self) -> dict[str, tuple[int, ...]]:
        for name, handle in self._named():
            self._note(handle, name)
        return {f":{name}": shape for name, shape in self._shapes.items()}

    def _find(self, value: Any, holder: Any) -> Found | None:
        if holder is None:
            return None
        graph = getattr(value, "graph", None)
        if graph is not None and graph not in self._graphs:
            self._graphs.add(graph)
            # Those of the first replica come first.
            for name, other in sorted(variables_of_graph(graph), key=_is_further):
                self._note(other, name)
        name = self._note(holder)
        shape = self._shapes.get(name)
        if shape is None:
            return None
        place = Place((), True, tuple(range(len(shape))))
        return Found("", name, 0, shape, None, place, self._holders[name])

    def _note(self, holder: Any, name: str = "") -> str:
        """Return the name of a variable; `name` is what to call it, if it has no name yet."""
        token = self._labels.look_up(holder)[0]
        known = self._names.get(token)
        if known is None:
            name = name or next((n for n, one in self._named() if one is holder), "")
            known, number = name or name_of_variable(holder) or f"#{token}", 1
            shape = shape_of_variable(holder)
            # All replicas have one weight, for which tools decide once.
            first = _REPLICA.sub("", known)
            if first != known and first in self._tokens and self._shapes.get(first) == shape:
                # At its end the interpreter takes names of modules away.
                key, pop = id(holder), REPLICAS.pop
                REPLICAS[key] = weakref.ref(holder, lambda _: pop(key, None))
                self._names[token] = first
                return first
            # Several variables may have one name.
            while known in self._tokens:
                number += 1
                known = f"{name}#{number}"
            self._names[token], self._tokens[known] = known, token
            self._holders[known] = weakref.ref(holder)
            if shape is not None:
                self._shapes[known] = shape
        return known


def _is_further(variable: tuple[str, Any]) -> bool:
    """Return True for a name and holder of a replica that is not the first one."""
    return _REPLICA.search(variable[0]) is not None
