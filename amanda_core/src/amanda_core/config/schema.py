"""The table ``[tool.amanda]``: its keys and their types.

Owns the check of the table as it was parsed; each mistake names file, line and the nearest key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from amanda_core.config.document import Document
from amanda_core.config.settings import Layer, Selecting, Setting, ToolSettings
from amanda_core.config.text import INSTALLED, NAME, check_name, parse_steps
from amanda_core.errors import ConfigError

__all__ = ["nearest", "read"]

_ROOT = ("tool", "amanda")
_KEYS = ("output", "drivers", "disable_plugins", "tools", "select")
_SELECT = ("ops", "modules", "namespace", "steps", "calls")
#: Keys of a tool's table that are not options of the tool.
RESERVED = ("enable", "select", "tool")


def nearest(name: str, known: Iterable[str], what: str = "it has") -> str:
    """Return a hint with the most similar of the known names, and all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    meant = f"Did you mean {close[0]!r}? " if close else ""
    return f"{meant}What {what}: {', '.join(names)}" if names else f"{meant}What {what}: nothing"


def read(document: Document) -> Layer:
    """Return the layer of a file that has the table.

    Raises:
        ConfigError: A key is unknown, or its value has the wrong type.
    """
    table = _table(document.data.get("tool", {}), document, _ROOT[:1]).get("amanda", {})
    table = _known(table, _KEYS, document, _ROOT)
    output = drivers = disabled = None
    if "output" in table:
        keys = (*_ROOT, "output")
        text = _string(table["output"], document, keys)
        output = Setting(text, document.where(*keys), base=document.path.parent.resolve())
    if "drivers" in table:
        keys = (*_ROOT, "drivers")
        drivers = Setting(_strings(table["drivers"], document, keys), document.where(*keys))
    if "disable_plugins" in table:
        keys = (*_ROOT, "disable_plugins")
        disabled = Setting(
            _strings(table["disable_plugins"], document, keys), document.where(*keys)
        )
    tools = _table(table.get("tools", {}), document, (*_ROOT, "tools"))
    return Layer(
        output,
        drivers,
        {name: _tool(name, value, document) for name, value in tools.items()},
        _selecting(table.get("select", {}), document, (*_ROOT, "select")),
        disabled,
        document.path,
    )


def _tool(name: str, value: Any, document: Document) -> ToolSettings:
    keys = (*_ROOT, "tools", name)
    where = document.where(*keys)
    check_name(name, where)
    table = _table(value, document, keys)
    enable = table.get("enable")
    if "enable" in table and not isinstance(enable, bool):
        raise _wrong("true or false", enable, document, (*keys, "enable"))
    tool = None
    if "tool" in table:
        tool = _string(table["tool"], document, (*keys, "tool"))
        if not INSTALLED.fullmatch(tool) or tool.endswith(".py"):
            # A file names installed tools only: reading one must not decide what is executed.
            raise ConfigError(
                f"{tool[:80]!r} is not the name of an installed tool",
                where=document.where(*keys, "tool"),
                fix="Use the flag for your own tool: -t module:Class",
            )
    base = document.path.parent.resolve()
    options = {
        key: Setting(option, document.where(*keys, key), base=base)
        for key, option in table.items()
        if key not in RESERVED
    }
    select = _selecting(table.get("select", {}), document, (*keys, "select"))
    return ToolSettings(name, where, tool if tool != name else None, options, enable, select)


def _selecting(value: Any, document: Document, keys: tuple[str, ...]) -> Selecting:
    table = _known(value, _SELECT, document, keys)
    if not table:
        return Selecting()
    namespace = None
    if "namespace" in table:
        namespace = _string(table["namespace"], document, (*keys, "namespace"))
    steps, calls = (
        parse_steps(table[key], document.where(*keys, key), key) if key in table else None
        for key in ("steps", "calls")
    )
    ops, modules = (
        _strings(table[key], document, (*keys, key)) if key in table else None
        for key in ("ops", "modules")
    )
    return Selecting(ops, modules, namespace, steps, calls, document.where(*keys))


def _known(
    value: Any, known: Iterable[str], document: Document, keys: tuple[str, ...]
) -> Mapping[str, Any]:
    table = _table(value, document, keys)
    for key in table:
        if key not in known:
            raise ConfigError(
                f"Unknown key {key[:80]!r} in [{_dotted(keys)}]",
                where=document.where(*keys, key),
                fix=nearest(key, known),
            )
    return table


def _table(value: Any, document: Document, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong("a table", value, document, keys)
    return value


def _string(value: Any, document: Document, keys: tuple[str, ...]) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _wrong("a text", value, document, keys)
    return value


def _strings(value: Any, document: Document, keys: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise _wrong("a text or a list of texts", value, document, keys)
    for index, part in enumerate(value):
        if part in value[:index]:
            raise ConfigError(
                f"{part[:80]!r} is twice in {_dotted(keys)}",
                where=document.where(*keys),
                fix="Name it once",
            )
    return tuple(value)


def _wrong(expected: str, value: Any, document: Document, keys: tuple[str, ...]) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ConfigError(
        f"{_dotted(keys)} must be {expected}, not {shown}", where=document.where(*keys)
    )


def _dotted(keys: Iterable[str]) -> str:
    return ".".join(key if NAME.fullmatch(key) else repr(key[:80]) for key in keys)
