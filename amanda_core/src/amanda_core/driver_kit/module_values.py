"""Arrays in what a module takes or returns, of which the first one is the module's value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

__all__ = ["arrays_in", "replace_first"]


def arrays_in(value: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Return the arrays in a value, in the order in which it is searched.

    Args:
        value: Lists, tuples and mappings are searched in their order; other objects are not.
        kinds: The classes of arrays.

    >>> arrays_in({"a": None, "b": [1.0, 2.0]}, (float,))
    [1.0, 2.0]
    """
    return [_at(value, path) for path in _paths(value, kinds)]


def replace_first(value: Any, kinds: tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to the first array in it, and leave `value` itself.

    Args:
        value: As for `arrays_in`.
        kinds: The classes of arrays.
        function: Gets the array, and returns what stands in its place.

    >>> replace_first({"a": None, "b": [1.0, 2.0]}, (float,), lambda array: array + 1)
    {'a': None, 'b': [2.0, 2.0]}
    """
    path = next(_paths(value, kinds), None)
    return value if path is None else _replaced(value, path, function)


def _paths(value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, kinds):
        yield ()
        return
    items = value.items() if isinstance(value, Mapping) else ()
    for key, item in enumerate(value) if isinstance(value, (list, tuple)) else items:
        for path in _paths(item, kinds):
            yield (key, *path)


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: tuple[Any, ...], function: Callable[[Any], Any]) -> Any:
    if not path:
        return function(value)
    old = value[path[0]]
    new = _replaced(old, path[1:], function)
    if new is old:
        return value
    if isinstance(value, MutableMapping):
        # An ordered or counting mapping stays one; its class may take other arguments.
        copy: Any = value.copy() if hasattr(value, "copy") else dict(value)
        copy[path[0]] = new
        return copy
    if isinstance(value, Mapping):
        return type(value)({**value, path[0]: new})  # type: ignore[call-arg]
    parts = [new if n == path[0] else item for n, item in enumerate(value)]
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
