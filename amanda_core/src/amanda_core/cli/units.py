"""Numbers with units, as people read them.

Owns the prefixes, and which columns of a table have a unit. Files and `--csv` have plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from amanda_core.results import Table

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Quantity", "humanized", "quantity"]

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"))
#: Headings that end with one of these are of counts that grow large.
_COUNTS = ("MACs", "FLOPs")


class Quantity(float):
    """A number that is shown with its unit.

    >>> f"{Quantity(80_000, 'B')}, {Quantity(1_250_000, 'ns')}, {Quantity(4.089e9, '')}"
    '80 kB, 1.25 ms, 4.089 G'
    """

    unit: str

    def __new__(cls, value: float, unit: str) -> Self:
        """Make one of a number in this unit, whose times are in ``ns`` or ``s``."""
        made = super().__new__(cls, value)
        made.unit = unit
        return made

    def __format__(self, _: str) -> str:
        """Return four digits, the prefix and the unit."""
        value, unit = (float(self) / 1e9, "s") if self.unit == "ns" else (float(self), self.unit)
        for factor, prefix in _SMALL if unit == "s" else _PREFIXES:
            if abs(value) >= factor:
                return f"{value / factor:.4g} {prefix}{unit}".rstrip()
        if unit == "s" and value:
            return f"{value * 1e9:.4g} ns"
        return f"{value:.4g} {unit}".rstrip()

    __str__ = __repr__ = lambda self: format(self, "")


def humanized(table: Table, units: Mapping[str, str] | None = None) -> Table:
    """Return a table with quantities instead of large plain numbers.

    Args:
        table: The table.
        units: Heading, or its last word as in ``total wall``, -> unit. Of other columns, those have
            one whose heading ends with `` B``, ``MACs`` or ``FLOPs``.
    """
    found: list[str | None] = []
    columns = []
    for column in map(str, table.columns):
        unit = units.get(column, units.get(column.rpartition(" ")[2])) if units else None
        if unit is None and column.endswith(" B"):
            unit, column = "B", column.removesuffix(" B")
        elif (unit is None and column.endswith(_COUNTS)) or unit in _COUNTS:
            unit = ""
        found.append(unit)
        columns.append(column)
    rows = [
        [quantity(value, unit) for value, unit in zip(row, found, strict=True)]
        for row in table.rows
    ]
    return Table(table.title, columns, rows)


def quantity(value: object, unit: str | None) -> object:
    """Return a number as a `Quantity`; any other value, or one without a unit, unchanged."""
    if unit is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return Quantity(value, unit)
