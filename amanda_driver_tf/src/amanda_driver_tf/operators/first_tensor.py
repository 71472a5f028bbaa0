"""Tensors in what a layer takes or returns, of which the first one is the layer's value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from amanda_driver_tf.tensorflow_internals.modules import tensor as tensor_lib

__all__ = ["replace_first", "tensors_in"]


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors and NumPy arrays in a value, in the order in which it is searched."""
    found = []
    for path in _paths(value):
        part = value
        for key in path:
            part = part[key]
        found.append(part)
    return found


def replace_first(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to the first tensor or NumPy array in it.

    Lists, tuples and mappings are searched in their order; other objects are not.

    >>> replace_first({"a": None, "b": [np.ones(1), np.ones(1)]}, lambda array: array + 1)
    {'a': None, 'b': [array([2.]), array([1.])]}
    """
    path = next(_paths(value), None)
    return value if path is None else _replaced(value, path, function)


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, (tensor_lib.Tensor, np.ndarray)):
        yield ()
        return
    items = value.items() if isinstance(value, Mapping) else ()
    for key, item in enumerate(value) if isinstance(value, (list, tuple)) else items:
        for path in _paths(item):
            yield (key, *path)


def _replaced(value: Any, path: tuple[Any, ...], function: Callable[[Any], Any]) -> Any:
    if not path:
        return function(value)
    old = value[path[0]]
    new = _replaced(old, path[1:], function)
    if new is old:
        return value
    if isinstance(value, Mapping):
        # An ordered or counting mapping stays one; its class may take other arguments.
        copy = value.copy() if hasattr(value, "copy") else dict(value)  # type: ignore[unused-ignore]
        copy[path[0]] = new
        return copy
    parts = [new if n == path[0] else item for n, item in enumerate(value)]
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
