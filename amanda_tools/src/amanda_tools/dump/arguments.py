"""Arguments of operators as JSON, from which they can be made again.

Owns the encoding. Numbers, texts, booleans and None stand for themselves, lists are lists, and
everything else is an object with one key, which says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from amanda_core.interface.facts import Facts, NotReadableError

__all__ = ["UnknownArgumentError", "decoded", "encoded"]


class UnknownArgumentError(Exception):
    """Raised if an argument has no encoding; the message says what it is."""


def encoded(value: Any, facts: Facts, place: str) -> Any:
    """Return an argument as JSON.

    Args:
        value: The argument.
        facts: Facts about tensors.
        place: Its position, by which a dump has the values of a tensor.

    >>> from amanda_tools.kit.tensors.values import UNKNOWN
    >>> encoded((1, slice(None, 2), float("inf")), UNKNOWN, "1")
    {'tuple': [1, {'slice': [None, 2, None]}, {'float': 'inf'}]}
    """
    if facts.is_tensor(value):
        form = facts.repeater.form(value) if facts.repeater is not None else None
        return {"tensor": place} if form is None else {"tensor": [place, *map(int, form)]}
    if isinstance(value, (list, tuple)):
        items = [encoded(item, facts, f"{place}.{n}") for n, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return {"slice": [encoded(end, facts, f"{place}.{n}") for n, end in enumerate(ends)]}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if value is ...:
        return {"ellipsis": True}
    constant = facts.constant(value)
    return {"unknown": type(value).__name__} if constant is None else {"constant": constant}


def decoded(
    value: Any,
    tensor: Callable[[str, list[int]], Any],
    constant: Callable[[str], Any],
    name: str,
) -> Any:
    """Return the argument that was encoded so.

    Args:
        value: The encoding.
        tensor: Returns the tensor at a position, given its form, which is empty for a new one.
        constant: Returns the framework's constant with this text.
        name: Name of the argument, for the error.

    Raises:
        UnknownArgumentError: It has no encoding, or is malformed.
    """

    def inner(one: Any) -> Any:
        return decoded(one, tensor, constant, name)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        if kind == "tensor":
            place, *form = content if isinstance(content, list) else [content]
            return tensor(place, list(map(int, form)))
        if kind == "tuple":
            return tuple(map(inner, content))
        if kind == "slice":
            return slice(*map(inner, content))
        if kind == "float":
            return float(content)
        if kind == "complex":
            return complex(*map(float, content))
        if kind == "ellipsis":
            return ...
        if kind == "constant":
            try:
                return constant(content)
            except NotReadableError as error:
                raise UnknownArgumentError(f"the argument {name!r} is {error}") from error
    except (TypeError, ValueError):
        kind, content = "malformed", str(value)[:80]
    raise UnknownArgumentError(f"the argument {name!r} is {kind}: {content}")
