"""How a difference between two runs spreads: in which modules and steps values differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from amanda_core.results import Table
from amanda_tools.kit.output import charts

__all__ = ["Reach", "reached", "spread_chart", "spread_of", "spread_table"]


@dataclass
class Reach:
    """How far the difference reaches in one module and step.

    Attributes:
        process: Which process it is in, such as ``rank1``; None if the run has one only.
        module: Path of the module; empty outside of modules.
        step: The step.
        first: Name of the first operator there of which a value differs.
        different: Number of values that differ.
        values: Number of values that were compared.
    """

    process: str | None
    module: str
    step: int
    first: str
    different: int
    values: int


def spread_of(values: Iterable[tuple[str, int, str, bool]]) -> list[Reach]:
    """Return the modules and steps in which values differ, in their order.

    Args:
        values: Module, step and operator of each value, and whether it differs.

    >>> [one.first for one in spread_of([("a", 0, "x", False), ("a", 0, "y", True)])]
    ['y']
    """
    found: dict[tuple[str, int], Reach] = {}
    counts: dict[tuple[str, int], int] = {}
    for module, step, op, differs in values:
        key = module, step
        counts[key] = counts.get(key, 0) + 1
        if differs:
            found.setdefault(key, Reach(None, module, step, op, 0, 0)).different += 1
    for key, one in found.items():
        one.values = counts[key]
    return list(found.values())


def reached(spread: Sequence[Reach], limit: int | None) -> list[str]:
    """Return a sentence on the modules that a difference reaches, if there are several.

    Args:
        spread: The modules and steps.
        limit: Number of modules that are named; None for all.
    """
    modules = list(dict.fromkeys(one.module for one in spread if one.module))
    steps = sorted({one.step for one in spread})
    if len(modules) < 2 and len(steps) < 2:
        return []
    named = ", ".join(map(repr, modules[:limit]))
    named += f" and {len(modules) - limit} more" if limit and len(modules) > limit else ""
    within = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return [f"Values differ in {within}" + (f", in modules {named}." if modules else ".")]


def spread_table(spread: Sequence[Reach]) -> Table:
    """Return a table with one row for each module and step in which values differ."""
    columns = ("module", "step", "process", "different", "values", "first")
    rows = [
        (one.module, one.step, one.process or "", one.different, one.values, one.first)
        for one in spread
    ]
    return Table("Where values differ", columns, rows)


def spread_chart() -> charts.Chart:
    """Return the chart of a result's ``spread``: the share of differing values by module and
    step.
    """
    return charts.heat("Where values differ", "spread", "module", "step", ("different", "values"))
