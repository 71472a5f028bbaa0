"""Results of tools, and the folder that they are written to.

Owns the protocols of results, plain text tables, and the rules of writing: nothing is written
outside of the output folder, and nothing is replaced silently. Reading a file of results does not
execute anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from amanda_core import bounded
from amanda_core.errors import OutputError, ResultError
from amanda_core.terminal import printable

__all__ = [
    "LIMIT",
    "HasOpFigures",
    "HasResult",
    "OpFigures",
    "Output",
    "Result",
    "Table",
    "TakesOpFigures",
    "load",
    "printable",
    "share",
]

#: Largest file of results that `load` reads, in bytes.
LIMIT = 1 << 28


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people.

    Attributes:
        title: A summary, which is printed above the table.
        columns: The headings.
        rows: Rows with a value for each column. Numbers are aligned to the right.

    >>> print(Table("Ops", ("op", "calls"), [("conv2d", 53), ("relu", 49)]))
    Ops
    op      calls
    conv2d     53
    relu       49
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ResultError(
                    f"A row of the table {self.title!r} has {len(row)} values for "
                    f"{len(self.columns)} columns",
                    fix="Give each row a value for each column",
                )

    def text(self) -> list[list[str]]:
        """Return the values as they are shown."""
        return [[printable(_number(value)) for value in row] for row in self.rows]

    def is_right(self, column: int) -> bool:
        """Return True if a column has only numbers and empty texts, and so is aligned right."""
        values = [row[column] for row in self.rows if row[column] != ""]
        return bool(values) and all(isinstance(value, (int, float)) for value in values)

    def first(self, count: int) -> Table:
        """Return the table with its first rows only."""
        return Table(self.title, self.columns, self.rows[:count])

    def __str__(self) -> str:
        cells = [[printable(column) for column in self.columns], *self.text()]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        right = [self.is_right(i) for i in range(len(self.columns))]
        lines = [
            "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([printable(self.title), *lines] if self.title else lines)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@runtime_checkable
class Result(Protocol):
    """The result of a tool. It may also have ``write(folder: Path) -> Sequence[Path]``.

    That method writes further files into `folder`, which exists and belongs to the tool, and
    returns their paths.
    """

    def table(self) -> Table:
        """Return the summary for people."""

    def to_json(self) -> str:
        """Return the whole result as JSON (RFC 8259, so without NaN).

        `amanda show` reads an object with a ``format``: name and version, such as ``my-tool/1``.
        """


@runtime_checkable
class HasResult(Protocol):
    """A tool that has results. The method is optional; `amanda run` calls it when a run ends."""

    def result(self) -> Result:
        """Return the result so far. It is called after tools are removed, also after Ctrl-C."""


class OpFigures(NamedTuple):
    """The figures of a result about one operator, which other tools' results may show.

    Attributes:
        namespace: Where the operator runs.
        id: Its op id, or the backward op id of a backward operator.
        name: Its readable name.
        is_backward: Whether it is a backward operator.
        values: Name -> number or text. The name of a number ends with its unit in brackets, such as
            ``self (s)`` or ``allocated (B)``; without a unit it is a count. Numbers are finite, and
            their sum over several operators has a meaning.
    """

    namespace: str
    id: int
    name: str
    is_backward: bool
    values: Mapping[str, int | float | str]


@runtime_checkable
class HasOpFigures(Protocol):
    """A result with figures about single operators. The method is optional."""

    def op_figures(self) -> Iterable[OpFigures]:
        """Return the figures of each operator."""


@runtime_checkable
class TakesOpFigures(Protocol):
    """A result that shows other results' figures about its operators. The method is optional."""

    def take_op_figures(self, figures: Mapping[str, Sequence[OpFigures]]) -> None:
        """Add the figures of other results, given by the name of their tool."""


def share(results: Mapping[str, object]) -> None:
    """Pass the figures of each result to those that take figures.

    Args:
        results: Results of tools that ran together, by the name of each.

    ``share({"graph": found, "flops": flops.result()})``
    """
    taking = {name: r for name, r in results.items() if isinstance(r, TakesOpFigures)}
    if taking:
        offered = {
            name: list(r.op_figures()) for name, r in results.items() if isinstance(r, HasOpFigures)
        }
        for name, result in taking.items():
            result.take_op_figures({by: found for by, found in offered.items() if by != name})


class Output:
    """The folder that the results of one run are written to. The first write creates it.

    Args:
        folder: The folder. A link to a folder is followed; links inside it are not.
        part: Name of a folder inside, for the results of one of several processes.
        names: Names of the tools. Whoever has read them has checked them.
        force: Whether to replace existing results of these names.

    Raises:
        OutputError: It cannot be written to, or has results of these names.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], *, part: str = "", force: bool = False
    ) -> None:
        self.folder = folder.resolve()
        if part:
            self.folder = self._inside(part)
        for parent in (self.folder, *self.folder.parents):
            if parent.exists():
                if not parent.is_dir():
                    raise OutputError(f"{str(parent)!r} is not a folder", fix="Name another one")
                if not os.access(parent, os.W_OK | os.X_OK):
                    raise OutputError(f"{str(parent)!r} cannot be written to", fix="Name another")
                break
        taken = self.taken(self.folder, names)
        if taken and not force:
            raise OutputError(
                f"{str(self.folder)!r} has results already: {', '.join(taken)}",
                fix="Name another folder with -o, or replace them with --force",
            )

    @staticmethod
    def taken(folder: Path, names: Sequence[str]) -> list[str]:
        """Return the files and folders of these tools that already exist in `folder`."""
        found = [f"{name}.json" for name in names] + list(names)
        return [name for name in found if os.path.lexists(folder / name)]

    def write(self, name: str, result: Result) -> list[Path]:
        """Write a tool's result to ``<name>.json``, and its further files to ``<name>/``.

        Returns:
            The files.

        Raises:
            OutputError: A file is outside of the folder or cannot be written.
            ResultError: The result's JSON is malformed.
        """
        own, file = self._inside(name), self._inside(f"{name}.json")
        text = result.to_json()
        try:
            json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError, TypeError) as error:
            raise ResultError(
                f"The result of {name!r} is not JSON: {error}", fix="Correct its to_json()"
            ) from error
        files = [self._replace(file, text)]
        write = getattr(result, "write", None)
        if write is not None:
            if not own.is_dir():
                _failing(own.mkdir, own, parents=True)
            files += [self._checked(own, Path(path), name) for path in write(own)]
            if not any(own.iterdir()):
                own.rmdir()
        return files

    def _inside(self, name: str) -> Path:
        path = self.folder / name
        if name in ("", ".", "..") or "\0" in name or path.parent != self.folder or "/" in name:
            raise OutputError(f"{name[:80]!r} is not a file name", fix="Give the tool another name")
        if path.is_symlink():
            raise OutputError(
                f"{str(path)!r} is a link, and is not followed", fix="Remove it, or name another"
            )
        return path

    def _replace(self, path: Path, text: str) -> Path:
        _failing(self.folder.mkdir, self.folder, parents=True, exist_ok=True)
        # Write another file first and rename it. So a reader never sees half a file, and a link
        # that somebody has put there is replaced, not followed.
        new = path.with_name(f".{path.name}.{os.getpid()}")

        def write() -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            try:
                with open(os.open(new, flags, 0o666), "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(new, path)
            finally:
                new.unlink(missing_ok=True)

        _failing(write, path)
        return path

    @staticmethod
    def _checked(own: Path, path: Path, name: str) -> Path:
        lexical = path if path.is_absolute() else own / path
        resolved = lexical.resolve()
        if not resolved.is_relative_to(own) or lexical.is_symlink():
            raise OutputError(
                f"The tool {name!r} wrote {printable(path)[:200]!r}, outside of its "
                f"folder {str(own)!r}",
                fix="A result's write() must stay in the folder that it is given",
            )
        if not resolved.is_file():
            raise OutputError(
                f"The tool {name!r} wrote {printable(path)[:200]!r}, which is not a file",
                fix="A result's write() must return the files that it wrote",
            )
        return resolved


def load(path: Path, limit: int = LIMIT) -> Any:
    """Read a file of results as JSON.

    Raises:
        ResultError: It cannot be read, is not a regular file, has more than `limit` bytes, or is
            not JSON.
    """
    try:
        content = bounded.read(path, limit)
    except bounded.Unreadable as error:
        raise ResultError(str(error), where=printable(path)) from error
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ResultError(
            f"Not valid JSON: {error}"[:300], where=str(path), fix="Write it again"
        ) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _failing(function: Any, path: Path, **arguments: Any) -> None:
    try:
        function(**arguments)
    except OSError as error:
        raise OutputError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
