"""Results of tools.

Owns the protocols of results, plain text tables, and reading, which does not execute anything.
`output` owns the folder that results are written to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from amanda_core.errors import ResultError
from amanda_core.runtime import bounded
from amanda_core.runtime.terminal import printable

__all__ = [
    "LIMIT",
    "ChangesWeights",
    "HasFigures",
    "HasOpFigures",
    "HasResult",
    "OpFigures",
    "Result",
    "Table",
    "TakesOpFigures",
    "load",
    "printable",
    "share",
]

_SHARE = re.compile(r"\d+(\.\d+)?%")

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
        """Return True if a column has only numbers, shares such as 7.1% and empty texts.

        It is aligned right, and stays longer than texts where a terminal is narrow.
        """
        values = [row[column] for row in self.rows if row[column] != ""]
        return bool(values) and all(
            isinstance(value, (int, float)) or _SHARE.fullmatch(str(value)) for value in values
        )

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
    """The result of a tool.

    It may also have ``write(folder: Path) -> Sequence[Path]``. That method writes further files
    into `folder`, which exists, is empty and belongs to the tool, and returns their paths.

    It may also have ``problems: Sequence[str]``, sentences without a full stop that say what was
    requested and is lost. With a problem the exit status of `amanda run` is not 0.
    """

    def table(self) -> Table:
        """Return the summary for people."""

    def to_json(self) -> str:
        """Return the whole result as JSON (RFC 8259, so without NaN).

        `amanda show` reads an object with a ``format``: name and version, such as ``my-tool/1``. It
        may have ``units``, field -> unit, and ``charts``, as docs/guides/charts.md describes.
        """


@runtime_checkable
class ChangesWeights(Protocol):
    """A tool that can write the weights as operators read them, without the tool.

    Attributes:
        saves_to: The folder for them at the end of a run; None for none.
        words: What messages call these weights, and those of the program.
        has_baked: Whether there are any so far.
        in_parts: Whether processes hold parts of them, so that to write them communicates.
    """

    saves_to: str | None
    words: tuple[str, str]

    @property
    def has_baked(self) -> bool: ...  # noqa: D102  Described above.

    @property
    def in_parts(self) -> bool: ...  # noqa: D102  Described above.

    def save_baked(self, folder: str) -> object:
        """Write them into a folder, and return the files, none if another process writes."""


@runtime_checkable
class HasResult(Protocol):
    """A tool that has results. The method is optional; `amanda run` calls it when a run ends.

    It calls it now and then before, too, in another thread, while the tool's routines wait. A tool
    whose `result` ends what it measures has an attribute ``result_is_final = True``: then it is
    called at the end only, and nothing is left of a process that is killed.
    """

    def result(self) -> Result:
        """Return the result so far. The last call is after tools are removed, also after Ctrl-C."""


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
class HasFigures(Protocol):
    """A result with single figures, which limits of a run are about. The method is optional."""

    def figures(self) -> Mapping[str, float | None]:
        """Return the figures that the tool's class declares as `Tool.figures`, by name.

        Times are in seconds, sizes in bytes, and shares of 1. None stands for what is not known.
        """


@runtime_checkable
class HasOpFigures(Protocol):
    """A result with figures about single operators. The method is optional."""

    def op_figures(self) -> Iterable[OpFigures]:
        """Return the figures of each operator."""


@runtime_checkable
class TakesOpFigures(Protocol):
    """A result that shows other results' figures about its operators. The method is optional."""

    def take_op_figures(self, figures: Mapping[str, Sequence[OpFigures]]) -> None:
        """Add the figures of other results, given by the name of their tool; some have none."""


def share(results: Mapping[str, object]) -> None:
    """Pass the figures of each result to those that take figures.

    Args:
        results: Results of tools that ran together, by the name of each.

    ``share({"graph": found, "flops": flops.result()})``
    """
    taking = {name: r for name, r in results.items() if isinstance(r, TakesOpFigures)}
    if taking:
        offered = {
            name: list(r.op_figures()) if isinstance(r, HasOpFigures) else []
            for name, r in results.items()
        }
        for name, result in taking.items():
            result.take_op_figures({by: found for by, found in offered.items() if by != name})


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
