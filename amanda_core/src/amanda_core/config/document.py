"""Finding and reading TOML files, and the line of a key.

Owns the limits of reading a file. It does not know the meaning of keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from amanda_core.errors import ConfigError
from amanda_core.runtime import bounded

__all__ = ["LIMIT", "Document", "find"]

#: Largest configuration file that is read, in bytes.
LIMIT = 1 << 20
#: Limit of the characters that are parsed to find a line. Above it, messages have no line.
_EFFORT = 20 * LIMIT
_FILE = "pyproject.toml"


class _EffortError(Exception):
    """Too many characters would be parsed to find a line."""


class Document:
    """A TOML file.

    Raises:
        ConfigError: It cannot be read, is not a regular file, is too large, or is not TOML.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = _read(path)
        self._lines = [line + "\n" for line in text.split("\n")]
        #: Characters that may still be parsed to find a line.
        self._left = _EFFORT
        try:
            self.data: dict[str, Any] = _loads()(text)
        except (ValueError, RecursionError) as error:
            # TOMLDecodeError is a ValueError and says the line; a key given twice is one of these.
            raise ConfigError(
                f"Not valid TOML: {str(error) or type(error).__name__}",
                where=str(path),
                fix="Correct the file, or ignore it with --no-config",
            ) from None

    def where(self, *keys: str) -> str:
        """``file:line`` of the statement that first gives a key; the file alone if none does."""
        line = self._line(keys)
        return f"{self.path}:{line}" if line else str(self.path)

    def _line(self, keys: Sequence[str]) -> int:
        """Return the first line of the statement that first gives a key; 0 if it is not found."""
        # The parser does not report positions. But a beginning of the file can be parsed if it ends
        # with a statement, and from some statement on the key is there: bisect for that statement.
        self._left = _EFFORT
        last = len(self._lines)
        try:
            line = bisect_left(
                range(last + 1), True, 1, key=lambda count: self._has_by(count, keys)
            )
        except _EffortError:
            return 0
        return self._first_line(line) if line <= last else 0

    def _first_line(self, last: int) -> int:
        """Return the first line of the statement that ends on line `last`."""
        with suppress(_EffortError):
            for line in range(last, 0, -1):
                if self._has_by(line - 1, (), whole=False):
                    return line
        return last

    def _has_by(self, count: int, keys: Sequence[str], whole: bool = True) -> bool:
        """Return whether the first `count` lines have the key. With `whole`, count as many more
        lines as it needs to parse.

        Raises:
            _EffortError: That is too much to parse.
        """
        for end in range(count, len(self._lines)):
            text = "".join(self._lines[:end])
            self._left -= len(text)
            if self._left < 0:
                raise _EffortError
            try:
                return _has(_loads()(text), keys)
            except (ValueError, RecursionError):
                if not whole:
                    return False
        return _has(self.data, keys)


def find(start: Path) -> Document | None:
    """Return the nearest pyproject.toml with a table ``[tool.amanda]``, in `start` or above.

    Raises:
        ConfigError: A nearer one cannot be read, so it is unknown whether it has the table.
    """
    for folder in (start, *start.parents):
        path = folder / _FILE
        if path.exists():
            document = Document(path)
            tool = document.data.get("tool")
            if isinstance(tool, dict) and "amanda" in tool:
                return document
    return None


def _read(path: Path) -> str:
    if not path.is_file():
        raise ConfigError("Not a file", where=str(path), fix="Name a TOML file")
    try:
        content = bounded.read(path, LIMIT)
    except bounded.Unreadable as error:
        raise ConfigError(str(error), where=str(path), fix="Name a TOML file") from error
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError("Not UTF-8, as TOML must be", where=f"{path}:{line}") from None


def _loads() -> Callable[[str], dict[str, Any]]:
    import tomllib  # Late: a run without a configuration file needs no parser.

    return tomllib.loads


def _has(data: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True
