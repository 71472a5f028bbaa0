"""Result of the tool: a table for people, JSON for programs, CSV and charts in a folder.

Independent of frameworks and of the tool's internal state.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from amanda_core.results import Table, printable

__all__ = ["FORMAT", "Range", "Ranges"]

#: Name and version of the JSON format.
FORMAT = "activation-ranges/1"


@dataclass(frozen=True)
class Range:
    """Values of one output of an op, or of all outputs of a module.

    Attributes:
        name: Readable name of the op, or path of the module.
        word: Common type of the operator; empty for a module.
        module: Path of the module in which the op runs.
        source: ``file:line`` of the call, if known.
        namespace: ``framework/version/mode``.
        output: Number of the output, from 0.
        dtypes: Types of the elements, as NumPy names them.
        executions: Number of executions of the op.
        elements: Number of elements in all executions.
        nan: Number of elements that are NaN.
        infinite: Number of elements that are negative and positive infinity.
        lowest: Smallest finite element; None if there is none.
        highest: Largest finite element.
        mean: Mean of the sampled elements.
        zeros: Share of zeros among the sampled elements.
        percentiles: Percentile -> estimate from the sampled elements, within 1/64 of its value.
        edges: Edges of the histogram's bins.
        counts: Number of sampled elements in each bin.
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
        """Return the name, with the number of the output unless it is the first."""
        return printable(f"{self.name}:{self.output}" if self.output else self.name)

    def quantization(self, bits: int = 8, clip: float | None = None) -> tuple[float, int]:
        """Return the scale and zero point of unsigned integers for these values.

        Args:
            bits: Number of bits of the integers.
            clip: A recorded percentile q: values below 100 - q or above q are clipped. Both must be
                recorded. None clips nothing.

        Returns:
            The values of ``real = scale * (integer - zero_point)``. Zero is always represented
            exactly.

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
        left_out: Name of an op -> reason why one of its values has no range.
        by: ``op`` or ``module``.
        charts: Number of histograms to draw.
    """

    ranges: Sequence[Range]
    left_out: Mapping[str, str] = field(default_factory=dict)
    by: str = "op"
    charts: int = 24

    def table(self) -> Table:
        """Return a table with one row for each range."""
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
        """Return the whole result as JSON."""
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
        # Imported late, so that reading results does not load matplotlib.
        from activation_ranges.plots import draw_histograms, draw_ranges

        files = [path, draw_ranges(drawn, folder / "ranges.png")]
        if self.charts > 0:
            files.append(draw_histograms(drawn, self.charts, folder / "histograms.png"))
        return files


def _shown(value: float | None) -> float | str:
    return "" if value is None else value
