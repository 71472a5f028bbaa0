"""The table ``[tool.amanda]``: its keys and their types.

Owns the check of the table as it was parsed; each mistake names file, line and the nearest key.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from amanda_core.config.document import Document
from amanda_core.config.settings import Layer, Selecting, Setting, Steps, ToolSettings
from amanda_core.config.text import INSTALLED, NAME, check_name, parse_steps, short
from amanda_core.errors import ConfigError

__all__ = ["nearest", "read"]

T = TypeVar("T")

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
    tool = _Value(document.data.get("tool", {}), document, _ROOT[:1]).table()
    table = tool["amanda"].table(_KEYS) if "amanda" in tool else {}
    return Layer(
        output=_given(table, "output", _Value.folder),
        drivers=_given(table, "drivers", _Value.names),
        disabled=_given(table, "disable_plugins", _Value.names),
        tools=_given(table, "tools", _tools) or {},
        select=_given(table, "select", _selecting) or Selecting(),
        path=document.path,
    )


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of the file, with the keys that lead to it."""

    value: Any
    document: Document
    keys: tuple[str, ...]

    @property
    def where(self) -> str:
        return self.document.where(*self.keys)

    @property
    def dotted(self) -> str:
        return ".".join(key if NAME.fullmatch(key) else repr(key[:80]) for key in self.keys)

    def wrong(self, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.dotted} must be {expected}, not {short(self.value)}", where=self.where
        )

    def table(self, known: Sequence[str] = ()) -> dict[str, _Value]:
        """Return the values of a table, whose keys must be `known` if these are given."""
        if not isinstance(self.value, dict):
            raise self.wrong("a table")
        found = {k: _Value(v, self.document, (*self.keys, k)) for k, v in self.value.items()}
        for key, value in found.items():
            if known and key not in known:
                raise ConfigError(
                    f"Unknown key {key[:80]!r} in [{self.dotted}]",
                    where=value.where,
                    fix=nearest(key, known),
                )
        return found

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value or "\0" in self.value:
            raise self.wrong("a text")
        return self.value

    def texts(self) -> tuple[str, ...]:
        texts = [self.value] if isinstance(self.value, str) else self.value
        if not isinstance(texts, list) or not all(isinstance(v, str) and v for v in texts):
            raise replace(self, value=texts).wrong("a text or a list of texts")
        for index, text in enumerate(texts):
            if text in texts[:index]:
                raise ConfigError(
                    f"{text[:80]!r} is twice in {self.dotted}",
                    where=self.where,
                    fix="Name it once",
                )
        return tuple(texts)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def steps(self) -> Steps:
        return parse_steps(self.value, self.where, self.keys[-1])

    def names(self) -> Setting:
        return Setting(self.texts(), self.where)

    def folder(self) -> Setting:
        self.text()
        return self.setting()

    def setting(self) -> Setting:
        """Return the value as it is. A path in it is relative to the file's folder."""
        return Setting(self.value, self.where, base=self.document.path.parent.resolve())


def _given(table: Mapping[str, _Value], key: str, read: Callable[[_Value], T]) -> T | None:
    return read(table[key]) if key in table else None


def _tools(value: _Value) -> dict[str, ToolSettings]:
    return {name: _tool(tool) for name, tool in value.table().items()}


def _tool(value: _Value) -> ToolSettings:
    name, where = value.keys[-1], value.where
    check_name(name, where)
    table = value.table()
    enable = _given(table, "enable", _Value.flag)
    tool = _given(table, "tool", _Value.text)
    if tool is not None and (not INSTALLED.fullmatch(tool) or tool.endswith(".py")):
        # A file names installed tools only: reading one must not decide what is executed.
        raise ConfigError(
            f"{tool[:80]!r} is not the name of an installed tool",
            where=table["tool"].where,
            fix="Use the flag for your own tool: -t module:Class",
        )
    options = {key: option.setting() for key, option in table.items() if key not in RESERVED}
    select = _given(table, "select", _selecting) or Selecting()
    return ToolSettings(name, where, tool if tool != name else None, options, enable, select)


def _selecting(value: _Value) -> Selecting:
    table = value.table(_SELECT)
    if not table:
        return Selecting()
    return Selecting(
        namespace=_given(table, "namespace", _Value.text),
        steps=_given(table, "steps", _Value.steps),
        calls=_given(table, "calls", _Value.steps),
        ops=_given(table, "ops", _Value.texts),
        modules=_given(table, "modules", _Value.texts),
        where=value.where,
    )
