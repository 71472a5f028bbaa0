"""Comparison of two runs by the figures of their results, such as time, memory, FLOPs or zeros.

Owns which files have figures. They are the numbers at the top of a result's part of a report.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from amanda_core.cli.units import Quantity
from amanda_core.errors import ResultError
from amanda_core.results import Table
from amanda_core.results.output import processes_in
from amanda_tools.kit.output.rendering import render_json

__all__ = ["FORMAT", "ComparedFigure", "FiguresDiff", "compare_figures", "has_figures"]

FORMAT = "amanda.figures/1"
_RECORDED = (".npy", ".safetensors")

_Value = float | str | None


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of both runs.

    Attributes:
        result: Name of the result, such as ``flops``.
        label: What the figure is.
        unit: Its unit; empty for a count.
        a: Its value in the first run; a text or a number.
        b: The same in the second run.
    """

    result: str
    label: str
    unit: str
    a: _Value
    b: _Value

    @property
    def change(self) -> float | None:
        """How much larger it is in the second run, as a share of the first; None if unknown."""
        if isinstance(self.a, str) or isinstance(self.b, str) or not self.a or self.b is None:
            return None
        return self.b / self.a - 1


@dataclass
class FiguresDiff:
    """The figures of two runs.

    Attributes:
        figures: Those that both have.
        only_a: Those that only the first run has, as ``flops: a step``.
        only_b: Those that only the second run has.
    """

    figures: list[ComparedFigure] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """True if all figures that both have are equal."""
        return all(one.a == one.b for one in self.figures)

    @property
    def complete(self) -> bool:
        """True if both have the same figures."""
        return not (self.only_a or self.only_b)

    def table(self, everything: bool = True) -> Table:
        """Return a table with a row for each figure, or only for those that differ."""
        shown = [one for one in self.figures if everything or one.a != one.b]
        rows = [
            (
                one.result,
                one.label,
                _shown(one.a, one.unit),
                _shown(one.b, one.unit),
                "" if one.change is None else f"{one.change:+.1%}",
            )
            for one in shown
        ]
        left = len([one for one in self.figures if one.a != one.b])
        title = f"{left} of {len(self.figures)} figures differ"
        return Table(title, ("result", "figure", "A", "B", "change"), rows)

    def conclusion(self, limit: int | None = None) -> str:
        """Return which figures only one run has."""
        sides = (("A", self.only_a), ("B", self.only_b))
        return "\n".join(
            f"Only in {name}: {', '.join(left[:limit])}" for name, left in sides if left
        )

    def to_json(self) -> str:
        """Return the result as JSON."""
        rows = [{**asdict(one), "change": one.change} for one in self.figures]
        return render_json(
            {"format": FORMAT, "figures": rows, "only_a": self.only_a, "only_b": self.only_b}
        )


def has_figures(path: Path) -> bool:
    """Return True for results with figures: a file, or a folder without recorded tensors.

    >>> has_figures(Path("there is no such folder"))
    False
    """
    if path.is_dir() and any(
        one.name == "index.json" or one.suffix in _RECORDED for one in path.rglob("*")
    ):
        return False
    return any(True for _ in _figures(path))


def compare_figures(a: Path, b: Path, ranks: Collection[int] | None = None) -> FiguresDiff:
    """Compare the figures of two results, or of all results in two folders.

    Args:
        a: A file that `amanda run` wrote, or a folder of them. In that of a run of several
            processes, each has figures of its own.
        b: Another one.
        ranks: Numbers of the processes to compare; None for all.

    Raises:
        ResultError: They have no figure in common.
    """
    of_a, of_b = dict(_figures(a, ranks)), dict(_figures(b, ranks))
    both = [key for key in of_a if key in of_b]
    if not both:
        raise ResultError(
            "These results have no figure in common",
            where=f"{a} and {b}",
            fix="Compare runs under the same tools, such as latency, memory, flops or sparsity",
        )
    return FiguresDiff(
        [ComparedFigure(*key[:2], of_a[key][1], of_a[key][0], of_b[key][0]) for key in both],
        [f"{key[0]}: {key[1]}" for key in of_a if key not in of_b],
        [f"{key[0]}: {key[1]}" for key in of_b if key not in of_a],
    )


def _figures(
    path: Path, ranks: Collection[int] | None = None, process: str = ""
) -> Iterator[tuple[tuple[str, str, int], tuple[_Value, str]]]:
    """Yield each figure: its result, its label and a number, and its value and unit."""
    parts = processes_in(path) if path.is_dir() and not process else []
    # A process that was started again counts once, with its last results.
    for name, part in {one.name.partition("-restart")[0]: one for one in parts}.items():
        if ranks is None or name in {f"rank{number}" for number in ranks}:
            yield from _figures(part, process=f"{name}/")
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        seen: list[str] = []
        for chart in _charts(file):
            for one in chart.get("items", ()) if chart.get("kind") == "figures" else ():
                label = str(one["label"])
                key = f"{process}{file.stem}", label, seen.count(label)
                yield key, (one["value"], one.get("unit") or "")
                seen.append(label)


def _charts(file: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []  # Not a result.
    found = content.get("charts") if isinstance(content, dict) and "format" in content else None
    return [one for one in found or () if isinstance(one, dict)]


def _shown(value: _Value, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.2%}" if unit == "%" else str(Quantity(value, unit))
