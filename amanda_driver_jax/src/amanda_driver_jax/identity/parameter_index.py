"""Parameters of a model by the identity of their arrays.

Owns what is computed once for all operators that read the same parameters in one trace. Which these
are is checked at each operator, by the identity of their arrays. Arrays are held weakly.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from amanda_driver_jax.trace_keys import LOCAL

__all__ = ["ParameterIndex", "ParameterIndices", "are_same", "references"]

#: How many indices are kept: those of the trees that functions around an operator get.
_MOST = 8


def references(values: Iterable[Any]) -> list[weakref.ref[Any]] | None:
    """Return weak references to values; None if one of them cannot be referred to weakly."""
    try:
        return [weakref.ref(value) for value in values]
    except TypeError:
        return None


def are_same(known: Iterable[weakref.ref[Any]], values: Iterable[Any]) -> bool:
    """Return True if each value is the one that is referred to, without a call of Python."""
    return all(map(operator.is_, map(operator.call, known), values))


class ParameterIndex:
    """Parameters of a model, as the operators of one trace read them.

    Args:
        found: The parameters by name.
        whole: Returns the array of which a parameter is a copy or a part.

    Attributes:
        names: The id of each array -> its name.
        structure: The names and shapes of the parameters.
    """

    def __init__(self, found: Mapping[str, Any], whole: Callable[[Any], Any]) -> None:
        arrays = [whole(value) for value in found.values()]
        self.names = {id(array): name for array, name in zip(arrays, found, strict=True)}
        self.structure = [(n, tuple(a.shape)) for a, n in zip(arrays, found, strict=True)]
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        #: The innermost traced call, as what an argument shows depends on it.
        self._traced = [weakref.ref(traced) for traced in LOCAL.arguments[-1:]]
        self._found, self._arrays = references(found.values()), references(arrays)

    def is_of(self, found: Mapping[str, Any]) -> bool:
        """Return True if the parameters, of the same names, are still these."""
        here = LOCAL.arguments[-1:]
        if self._found is None or self._arrays is None or len(self._traced) != len(here):
            return False
        if not are_same(self._traced, here):
            return False
        alive = map(operator.is_not, map(operator.call, self._arrays), itertools.repeat(None))
        return all(alive) and are_same(self._found, found.values())

    def shapes(self, root: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes by the owners of the parameters. One with several names counts once."""
        if root not in self._shapes:
            shapes = dict(self.structure)
            self._shapes[root] = {f"{root}:{n}": shapes[n] for n in self.names.values()}
        return self._shapes[root]


class ParameterIndices:
    """The indices of the parameters that were read last.

    Args:
        whole: Returns the array of which a parameter is a copy or a part.
    """

    def __init__(self, whole: Callable[[Any], Any]) -> None:
        self._whole = whole
        self._known: dict[tuple[str, ...], ParameterIndex] = {}

    def of(self, found: Mapping[str, Any]) -> ParameterIndex:
        """Return the index of these parameters by name."""
        key = tuple(found)
        index = self._known.get(key)
        if index is None or not index.is_of(found):
            if len(self._known) >= _MOST:
                self._known.clear()
            index = self._known[key] = ParameterIndex(found, self._whole)
        return index
