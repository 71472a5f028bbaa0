"""Conditions of `--fail-if`: limits of a run's figures, for continuous integration.

Owns how a condition is written, which figures there are, and what is said of one that holds.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from amanda_core.cli.units import Quantity
from amanda_core.config.schema import nearest
from amanda_core.engine.tool import Tool
from amanda_core.errors import ConfigError
from amanda_core.results import HasFigures, Result
from amanda_core.runtime.containment import contain, described

__all__ = ["EXIT_STATUS", "Condition", "conditions"]

#: Exit status of `amanda run` if a condition holds, and all else went well.
EXIT_STATUS = 4
_FLAG = "--fail-if"
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(
    r"\s*(?P<tool>[\w.\-]+)\.(?P<figure>\w+)\s*(?P<compare>>=|<=|==|!=|>|<)"
    r"\s*(?P<number>[-+]?\d[\d_]*(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*(?P<unit>[a-zA-Zµ%]*)\s*"
)
#: Unit of a figure -> units in which a limit of it may be written, and how much each is.
_UNITS: Mapping[str, Mapping[str, float]] = {
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "B": {
        "B": 1.0,
        **{f"{prefix}B": 1e3 ** (power + 1) for power, prefix in enumerate("kMGT")},
        **{f"{prefix}iB": 1024.0 ** (power + 1) for power, prefix in enumerate("KMGT")},
    },
    "%": {"": 1.0, "%": 1e-2},
    "": {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12},
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A limit of one figure. The run fails if it holds.

    Attributes:
        text: As it was written.
        tool: Name of the tool's result.
        figure: Name of the figure.
        compare: The comparison.
        limit: What it is compared with, in the figure's unit.
        unit: That unit.
    """

    text: str
    tool: str
    figure: str
    compare: str
    limit: float
    unit: str

    def problem(self, results: Mapping[str, Result]) -> str:
        """Return what is wrong with the results: the condition holds, or cannot be decided."""
        value: float | None = None
        why = ""
        try:
            result: object = results.get(self.tool)
            if isinstance(result, HasFigures):
                value = result.figures().get(self.figure)
        except BaseException as error:
            contain(error)
            why = f": {described(error)}"
        if value is None or math.isnan(value):
            return f"{self.tool}.{self.figure} is not known{why}, so {self.text!r} is not decided"
        if not _COMPARE[self.compare](value, self.limit):
            return ""
        shown = str(Quantity(value, self.unit))
        if self.unit in ("", "%"):  # Counts exactly, whatever their size.
            shown = f"{value:.2%}" if self.unit else f"{value:.15g}"
        return f"{self.text!r} holds: {self.tool}.{self.figure} is {shown}"


def conditions(texts: Sequence[str], tools: Mapping[str, Tool]) -> list[Condition]:
    """Return the conditions that are written so.

    Args:
        texts: Each ``TOOL.FIGURE > NUMBER``, with a unit after the number where the figure has one.
        tools: The tools that run, by the names of their results.

    Raises:
        ConfigError: One is not written so, or names a figure that the tools do not have.
    """
    return [_parsed(text, tools) for text in texts]


def _parsed(text: str, tools: Mapping[str, Tool]) -> Condition:
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{text[:80]!r} is not a condition",
            where=_FLAG,
            fix=f"Write {_FLAG} 'flops.total > 2e9' or {_FLAG} 'latency.step_median > 20ms'",
        )
    tool, figure = found["tool"], found["figure"]
    known = {f"{name}.{one}": unit for name in tools for one, unit in _figures(tools[name]).items()}
    unit = known.get(f"{tool}.{figure}")
    if unit is None:
        raise ConfigError(
            f"The tools of this run have no figure {tool}.{figure}",
            where=f"{_FLAG} {text!r}",
            fix=nearest(f"{tool}.{figure}", known, "this run has"),
        )
    factors = _UNITS.get(unit, _UNITS[""])
    given = found["unit"] or ("" if "" in factors else unit)
    if given not in factors:
        raise ConfigError(
            f"{given!r} is not a unit of {tool}.{figure}",
            where=f"{_FLAG} {text!r}",
            fix=f"Units of it: {', '.join(filter(None, factors))}",
        )
    limit = float(found["number"]) * factors[given]
    return Condition(text, tool, figure, found["compare"], limit, unit)


def _figures(tool: Tool) -> Mapping[str, str]:
    """Return the figures that a tool's class declares; a tool may use the name otherwise."""
    found = getattr(type(tool), "figures", None)
    return found if isinstance(found, Mapping) else {}
