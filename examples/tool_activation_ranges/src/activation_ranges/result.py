"""What the tool found out: a table for people, JSON for programs, CSV and charts in a folder.

Owns the form of the results; depends on no framework and on nothing that the tool keeps.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from amanda_core.results import Table, printable

__all__ = ["FORMAT", "Range", "Ranges"]

#: Name and version of the JSON.
FORMAT = "activation-ranges/1"


@dataclass(frozen=True)
class Range:
    """The values of one output of an op, or of all outputs of a module.

    Attributes:
        name: Readable name of the op, or path of the module.
        word: The operator in the common words; empty for a module.
        module: Path of the module that the op runs in.
        source: ``file:line`` of the call, as far as known.
        namespace: ``framework/version/mode``.
        output: Which output, from 0.
        dtypes: The types of the elements, as NumPy calls them.
        executions: How often the op ran.
        elements: Of all executions together.
        nan: How many elements are not a number.
        infinite: How many are negative and positive infinity.
        lowest: The smallest finite element; None where there is none.
        highest: The largest.
        mean: Of the sampled elements.
        zeros: Which part of the sampled elements is 0.
        percentiles: Percentile -> estimate, within 1/64 of its value, of the sampled elements.
        edges: Of the histogram's bins.
        counts: Of the sampled elements, for each bin.
    """

    name: str
    word: str
    module: str
    source: str
    namespace: str
    output: int
    dtypes: tuple[str, ...]
    executions: int
    elements: int
    nan: int = 0
    infinite: tuple[int, int] = (0, 0)
    lowest: int | float | None = None
    highest: int | float | None = None
    mean: float | None = None
    zeros: float | None = None
    percentiles: Mapping[float, float] = field(default_factory=dict)
    edges: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """The name, with the number of the output where it is not the first."""
        return printable(f"{self.name}:{self.output}" if self.output else self.name)

    def quantization(self, bits: int = 8, clip: float | None = None) -> tuple[float, int]:
        """Scale and zero point of unsigned integers for these values.

        Args:
            bits: Of the integers.
            clip: A recorded percentile q: what lies below 100 - q or above q is clipped. Both have
                to be recorded. None clips nothing.

        Returns:
            ``real = scale * (integer - zero_point)``; zero itself is always among the numbers.

        Raises:
            ValueError: Nothing finite was recorded, or the percentile was not.
        """
        if self.lowest is None or self.highest is None:
            raise ValueError(f"{self.name}: no finite value was recorded")
        low, high = float(self.lowest), float(self.highest)
        if clip is not None:
            ends = [
                next((v for p, v in self.percentiles.items() if abs(p - q) < 1e-9), None)
                for q in (100 - clip, clip)
            ]
            if ends[0] is None or ends[1] is None:
                raise ValueError(f"{self.name}: record the percentiles {100 - clip:g} and {clip:g}")
            low, high = ends[0], ends[1]
        low, high = min(low, 0.0), max(high, 0.0)
        steps = 2**bits - 1
        scale = (high / steps - low / steps) or 1.0
        return scale, round(-low / scale)


@dataclass(frozen=True)
class Ranges:
    """All ranges of a run, in the order of first execution.

    Attributes:
        ranges: One for each output of each op, or for each module.
        left_out: Name of an op -> why a value of it has no range.
        by: ``op`` or ``module``.
        charts: How many histograms are drawn.
    """

    ranges: Sequence[Range]
    left_out: Mapping[str, str] = field(default_factory=dict)
    by: str = "op"
    charts: int = 24

    def table(self) -> Table:
        """The ranges, a row for each."""
        shown = sorted({percentile for each in self.ranges for percentile in each.percentiles})
        rows = [
            [
                each.title,
                each.word,
                _shown(each.lowest),
                *(_shown(each.percentiles.get(percentile)) for percentile in shown),
                _shown(each.highest),
                "" if each.zeros is None else f"{each.zeros:.1%}",
                each.nan,
                sum(each.infinite),
                each.executions,
            ]
            for each in self.ranges
        ]
        heads = [f"p{percentile:g}" for percentile in shown]
        columns = [self.by, "type", "min", *heads, "max", "zeros", "nan", "inf", "runs"]
        title = f"Activation ranges by {self.by}"
        if self.left_out:
            title += f"; left out values of {len(self.left_out)} ops"
        return Table(title, columns, rows)

    def to_json(self) -> str:
        """All of it."""
        ranges = []
        for each in self.ranges:
            plain = asdict(each)
            plain["percentiles"] = {f"{p:g}": value for p, value in each.percentiles.items()}
            ranges.append(plain)
        content = {
            "format": FORMAT,
            "by": self.by,
            "ranges": ranges,
            "left_out": dict(self.left_out),
        }
        return json.dumps(content, allow_nan=False)

    def write(self, folder: Path) -> Sequence[Path]:
        """Write ``ranges.csv``, and ``ranges.png`` and ``histograms.png`` if there is a range."""
        table = self.table()
        path = folder / "ranges.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.columns)
            writer.writerows(table.rows)
        drawn = [each for each in self.ranges if each.lowest is not None]
        if not drawn:
            return [path]
        # Not before: who only reads results need not wait for it.
        from activation_ranges.plots import draw_histograms, draw_ranges

        files = [path, draw_ranges(drawn, folder / "ranges.png")]
        if self.charts > 0:
            files.append(draw_histograms(drawn, self.charts, folder / "histograms.png"))
        return files


def _shown(value: float | None) -> float | str:
    return "" if value is None else value
