"""Parsing settings that are written as text: ``-t`` flags, lists, ranges of steps.

Owns the small grammar ``[ALIAS=]TOOL[:key=value,...]``. Values are not converted, because the tool
has the types of its options.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from amanda_core.config.settings import Setting, Steps, ToolSettings
from amanda_core.errors import ConfigError

__all__ = [
    "INSTALLED",
    "NAME",
    "check_name",
    "parse_list",
    "parse_steps",
    "parse_tool",
    "parse_tools",
    "short",
    "split",
    "unquoted",
]

#: Names of tools and their aliases, which are also file names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.[A-Za-z0-9_-]{1,63}){0,8}")
#: Names of installed tools: ``TOOL`` or ``DISTRIBUTION/TOOL``.
INSTALLED = re.compile(rf"({NAME.pattern}/)?{NAME.pattern}")
_ATTRIBUTE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_PAIRS = {"[": "]", "(": ")", "{": "}"}


def split(text: str, separator: str, where: str) -> list[str]:
    """Split at separators outside quotes and brackets; blank parts are dropped.

    Args:
        text: The text.
        separator: One character.
        where: The setting that has the text, for messages, such as ``-t trace``.

    Raises:
        ConfigError: A quote or bracket is not closed.

    >>> split("a=[1,2], b='x,y'", ",", "here")
    ['a=[1,2]', "b='x,y'"]
    """
    parts, start, closing, quote = [], 0, [], ""
    for index, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and (index == start or text[index - 1] in "=[,; "):
            quote = letter  # An apostrophe inside a word is not a quote.
        elif letter in _PAIRS:
            closing.append(_PAIRS[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter == separator and not closing:
            parts.append(text[start:index].strip())
            start = index + 1
    if quote or closing:
        raise ConfigError(
            f"{quote or closing[-1]} is missing in {short(text)}", where=where, fix="Close it"
        )
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def unquoted(text: str) -> str:
    """Return text without the quotes around it, which are ``'`` or ``"``.

    One pair is removed, and backslashes stay as they are. Text that does not begin and end with the
    same quote is returned unchanged.

    >>> unquoted("'a b'"), unquoted("a'"), unquoted("'")
    ('a b', "a'", "'")
    """
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def parse_list(text: str, where: str) -> list[str]:
    """Return the parts of ``[a,b]`` without quotes, or a list of one part for any other text.

    Args:
        text: The text; empty for no parts.
        where: The setting that has it, for messages.

    Raises:
        ConfigError: A quote or bracket is not closed.
    """
    if text.startswith("[") and text.endswith("]"):
        return [unquoted(part) for part in split(text[1:-1], ",", where)]
    return [unquoted(text)] if text else []


def parse_tool(text: str, where: str) -> ToolSettings:
    """Read ``[ALIAS=]TOOL[:key=value,...]``.

    TOOL is the name of an installed tool, ``module:Class`` or ``path/to/file.py:Class``. If several
    installed tools have one name, the distribution comes before it (``acme-tools/trace``). The text
    after the first colon is a list of options if it has a ``=``, otherwise a class.

    Args:
        text: The text.
        where: The setting that has it, for messages.

    Raises:
        ConfigError: It has another form, or gives an option twice.
    """
    form = "Write -t TOOL[:key=value,...] or -t ALIAS=TOOL[:key=value,...]"
    head, _, rest = text.partition(":")
    alias, equals, tool = head.partition("=")
    if not equals:
        alias, tool = "", head
    attribute, _, options = rest.partition(":")
    default = tool.rpartition("/")[2]
    if rest and "=" not in attribute:
        if not _ATTRIBUTE.fullmatch(attribute):
            raise ConfigError(f"{short(text)} does not name a tool", where=where, fix=form)
        tool, default = f"{tool}:{attribute}", attribute
    else:
        options = rest
        if not INSTALLED.fullmatch(tool) or tool.endswith(".py"):
            raise ConfigError(f"{short(tool)} is not the name of a tool", where=where, fix=form)
    name = check_name(alias.strip() or default, where)
    found: dict[str, Setting] = {}
    for part in split(options, ",", where):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.isidentifier():
            raise ConfigError(f"{short(part)} is not of the form key=value", where=where, fix=form)
        if key in found:
            raise ConfigError(f"The option {key!r} is given twice", where=where, fix="Give it once")
        found[key] = Setting(value, where, text=True)
    return ToolSettings(name, where, tool if tool != name else None, found)


def check_name(name: str, where: str) -> str:
    """Return `name` if it can be the name of a file of results.

    Args:
        name: The name of a tool, or its alias.
        where: The setting that has it, for messages.

    Raises:
        ConfigError: It is not a plain name.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{short(name)} cannot be the name of a tool",
            where=where,
            fix="Use letters, digits, '-', '_' and '.', at most 64: a file gets this name",
        )
    return name


def parse_steps(value: object, where: str, name: str = "steps") -> Steps:
    """Read ``10:20`` (10 to 19), ``10:``, ``:20``, ``::100``, a number, or a list of numbers.

    Args:
        value: The value of the setting. The numbers count from 0.
        where: The setting that has it, for messages.
        name: The word for what is counted, for messages.

    Raises:
        ConfigError: It is none of these, or a number is negative.

    >>> parse_steps("10:20", "here"), parse_steps([1, 5], "here"), parse_steps("3", "here")
    (slice(10, 20, None), (1, 5), (3,))
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return (value,)
    if isinstance(value, (list, tuple)):
        if value and all(type(step) is int and step >= 0 for step in value):
            return tuple(value)
    elif isinstance(value, str) and re.fullmatch(r"\d{1,18}", value, re.ASCII):
        return (int(value),)
    elif isinstance(value, str) and re.fullmatch(r"\d{0,18}:\d{0,18}(:\d{0,18})?", value, re.ASCII):
        parts = [int(part) if part else None for part in value.split(":")]
        if parts[2:] != [0]:
            return slice(*parts)
    raise ConfigError(
        f"{short(value)} is not a range of {name}",
        where=where,
        fix="Write '10:20' (from 10 up to and without 20), '10:', '::100', 7, or [1, 2, 3]",
    )


def parse_tools(texts: Sequence[str], where: str) -> dict[str, ToolSettings]:
    """Read several tools; return them by name, in order.

    Args:
        texts: The tools, each as for `parse_tool`.
        where: The setting that has them, for messages.

    Raises:
        ConfigError: One is malformed, or two have one name.
    """
    found: dict[str, ToolSettings] = {}
    for text in texts:
        settings = parse_tool(text, where)
        if settings.name in found:
            raise ConfigError(
                f"The tool {settings.name!r} is named twice",
                where=where,
                fix=f"Give the second one another name: {settings.name}2={settings.reference}",
            )
        found[settings.name] = settings
    return found


def short(value: object) -> str:
    """Return a value as it is shown in a message: its `repr`, cut at 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
