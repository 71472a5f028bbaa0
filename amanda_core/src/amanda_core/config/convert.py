"""Converting values of options by the annotations of a tool's parameters.

Owns which annotations can be written in a file or a flag, and how. Values are not evaluated.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from amanda_core.config.settings import Setting
from amanda_core.config.text import parse_list, unquoted

__all__ = ["MismatchError", "convert", "expected"]

#: Number of values in the longest range.
_LONGEST = 1_000_000
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_PLAIN: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
}


class MismatchError(ValueError):
    """The value is not of the type; the message says which type is expected."""


def expected(annotation: Any) -> str:
    """Describe an annotation's type; return "" if it cannot be written as text."""
    if annotation in (Any, None, type(None)):
        return "a value" if annotation is Any else "none"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {_listed(member.name for member in annotation)}"
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {_listed(arguments)}"
    if origin in (Union, types.UnionType):
        # A type that cannot be written, such as a list of objects, is for code.
        parts = [part for part in map(expected, arguments) if part]
        return " or ".join(parts) if parts != ["none"] else ""
    item = _item(annotation)
    if item is not None and expected(item):
        ranges = ", or ranges such as 10:20" if item is int else ""
        return f"a list of values, each {expected(item)}{ranges}"
    return ""


def convert(setting: Setting, annotation: Any) -> Any:
    """Return the value in the type of the annotation.

    Raises:
        MismatchError: The value does not fit the annotation.
    """
    return _convert(setting.value, annotation, setting)


def _convert(value: Any, annotation: Any, setting: Setting) -> Any:
    origin = get_origin(annotation)
    if annotation is Any:
        return _guess(value) if setting.text else value
    if origin in (Union, types.UnionType):
        return _union(value, annotation, setting)
    if annotation in (None, type(None)):
        if setting.text and value.lower() in ("", "none"):
            return None
    elif origin is Literal:
        return _literal(value, annotation, setting)
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum(value, annotation, setting)
    elif annotation in _PLAIN:
        return _plain(value, annotation, setting)
    elif (item := _item(annotation)) is not None:
        return _list(value, annotation, item, setting)
    raise MismatchError(expected(annotation))


def _plain(value: Any, kind: Any, setting: Setting) -> Any:
    text = unquoted(value) if setting.text else ""
    try:
        if kind in (str, Path):
            found = text if setting.text else value
            if isinstance(found, str) and "\0" not in found and (found or kind is str):
                return found if kind is str else _path(found, setting)
        elif kind is bool:
            if setting.text and text.lower() in (*_TRUE, *_FALSE):
                return text.lower() in _TRUE
            if isinstance(value, bool):
                return value
        elif setting.text:
            return kind(text)
        elif type(value) is int or (kind is float and type(value) is float):
            return kind(value)
    except (ValueError, OverflowError):
        pass
    raise MismatchError(_PLAIN[kind])


def _path(text: str, setting: Setting) -> Path:
    path = Path(os.path.expanduser(text))  # Path.expanduser raises for a user who does not exist.
    return setting.base / path if setting.base is not None else path


def _union(value: Any, annotation: Any, setting: Setting) -> Any:
    # Any text fits `str`, so `str` comes last, and None before it.
    parts = sorted(get_args(annotation), key=lambda part: (part is str) + (part in (str, Path)))
    for part in sorted(parts, key=lambda part: part is not type(None)):
        try:
            return _convert(value, part, setting)
        except MismatchError:
            continue
    raise MismatchError(expected(annotation))


def _literal(value: Any, annotation: Any, setting: Setting) -> Any:
    for choice in get_args(annotation):
        if type(choice) is type(value) and choice == value:
            return choice
        if setting.text and str(choice) == unquoted(value):
            return choice
    raise MismatchError(expected(annotation))


def _enum(value: Any, annotation: type[Enum], setting: Setting) -> Enum:
    name = unquoted(value) if setting.text else value
    for member in annotation:
        if name == member.name or (type(name) is type(member.value) and name == member.value):
            return member
        if setting.text and name == str(member.value):
            return member
    raise MismatchError(expected(annotation))


def _list(value: Any, annotation: Any, item: Any, setting: Setting) -> Any:
    written = setting.text or (item is int and isinstance(value, str))
    parts = parse_list(value, setting.where) if written else value
    if item is int and isinstance(parts, list):
        kind = str if setting.text else int
        parts = [one for part in parts for one in _range(part, annotation, kind)]
    if not isinstance(parts, list):
        raise MismatchError(expected(annotation))
    found = [_convert(part, item, setting) for part in parts]
    return tuple(found) if get_origin(annotation) is tuple else found


def _range(part: Any, annotation: Any, kind: type[int | str]) -> list[Any]:
    """Return the numbers that are written as ``10:20``, without 20, or the part itself."""
    if not isinstance(part, str) or ":" not in part:
        return [part]
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", part, re.ASCII)
    numbers = range(int(found[1]), int(found[2])) if found else range(0)
    if not 0 < len(numbers) <= _LONGEST:
        raise MismatchError(expected(annotation))
    return [kind(number) for number in numbers]


def _item(annotation: Any) -> Any:
    """Return the item type of a list, a sequence or a tuple of any length; None for other types."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (list, Sequence) or origin in (list, Sequence):
        return arguments[0] if arguments else Any
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return arguments[0]
    return None


def _guess(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return unquoted(text)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(repr(value) for value in values)
