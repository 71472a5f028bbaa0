"""Tables, JSON, CSV and charts, also of unusual names and numbers."""

from __future__ import annotations

import csv
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from activation_ranges import ActivationRanges, Range, Ranges
from activation_ranges.sketch import Sketch
from amanda_core.results import HasResult, Result


def made(values: Any, name: str = "net/relu", **other: Any) -> Range:
    values = np.asarray(values, np.float64)
    sketch = Sketch()
    sketch.add(values)
    low, high = float(values.min()), float(values.max())
    edges, counts = sketch.histogram(20, low, high)
    percentiles = (1.0, 50.0, 99.0)
    facts: dict[str, Any] = {
        "name": name,
        "word": "relu",
        "module": "net",
        "source": "net.py:3",
        "namespace": "pytorch/2.13.0/eager",
        "output": 0,
        "dtypes": ("float32",),
        "executions": 1,
        "elements": values.size,
        "lowest": low,
        "highest": high,
        "mean": float(values.mean()),
        "zeros": 0.25,
        "percentiles": dict(
            zip(percentiles, sketch.percentiles(percentiles, low, high), strict=True)
        ),
        "edges": tuple(edges.tolist()),
        "counts": tuple(counts.tolist()),
    }
    return Range(**{**facts, **other})


NOTHING = Range("net/empty", "relu", "net", "", "pytorch/2.13.0/eager", 0, ("float32",), 1, 0)
MANY = [made(np.linspace(-n, 2 * n, 50), f"layer{n}/relu") for n in range(1, 200)]


def size_of(path: Path) -> tuple[int, int]:
    """Return width and height of a PNG."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_the_tool_has_a_result() -> None:
    tool = ActivationRanges()
    assert isinstance(tool, HasResult)
    assert isinstance(tool.result(), Result)


def test_the_table() -> None:
    table = Ranges([made([-1.0, 0.0, 3.0]), NOTHING], {"net/mask": "bool"}).table()
    assert table.columns == [
        *("op", "type", "min", "p1", "p50", "p99", "max", "zeros", "nan", "inf", "runs")
    ]
    first, second = table.rows
    assert first[:3] == ["net/relu", "relu", -1.0]
    assert first[6:] == [3.0, "25.0%", 0, 0, 1]
    assert second == ["net/empty", "relu", "", "", "", "", "", "", 0, 0, 1]
    assert table.title == "Activation ranges by op; left out values of 1 ops"
    str(table)


def test_json_has_everything() -> None:
    result = Ranges([made([-1.0, 0.0, 3.0]), NOTHING], {"net/mask": "bool"})
    found = json.loads(result.to_json(), parse_constant=pytest.fail)
    assert found["format"] == "activation-ranges/1"
    assert found["left_out"] == {"net/mask": "bool"}
    first, second = found["ranges"]
    assert (first["lowest"], first["highest"]) == (-1.0, 3.0)
    assert set(first["percentiles"]) == {"1", "50", "99"}
    assert len(first["edges"]) == len(first["counts"]) + 1
    assert second["lowest"] is None


def test_files(tmp_path: Path) -> None:
    result = Ranges([made([-1.0, 0.0, 3.0]), made([1.0, 2.0], "net/exp"), NOTHING])
    files = result.write(tmp_path)
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert {path.name for path in files} == {"ranges.csv", "ranges.png", "histograms.png"}
    with (tmp_path / "ranges.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows] == ["op", "net/relu", "net/exp", "net/empty"]
    assert min(size_of(tmp_path / "ranges.png")) > 100
    assert min(size_of(tmp_path / "histograms.png")) > 100


def test_without_a_range_there_is_no_chart(tmp_path: Path) -> None:
    assert [path.name for path in Ranges([NOTHING]).write(tmp_path)] == ["ranges.csv"]


def test_charts_can_be_turned_off(tmp_path: Path) -> None:
    files = Ranges([made([1.0, 2.0])], charts=0).write(tmp_path)
    assert [path.name for path in files] == ["ranges.csv", "ranges.png"]


def test_charts_of_huge_models_stay_readable(tmp_path: Path) -> None:
    Ranges(MANY).write(tmp_path)
    assert max(size_of(tmp_path / "ranges.png")) < 3000
    assert max(size_of(tmp_path / "histograms.png")) < 3000


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0],
        [5.0],
        [-1e-320, 0.0],
        [1e-300, 1e300],
        [-1.7e308, 1.7e308],
        [float(2**62), 5.0],
    ],
)
def test_charts_of_extreme_numbers(tmp_path: Path, values: list[float]) -> None:
    files = Ranges([made(values), made([-1.0, 1.0])]).write(tmp_path)
    assert len(files) == 3


@pytest.mark.parametrize(
    "name", ["$x^{", "层/卷积", "a" * 500, "new\nline", "\x1b[31mred", "100% <b>|</b>"]
)
def test_charts_and_tables_of_awkward_names(tmp_path: Path, name: str) -> None:
    result = Ranges([made([-1.0, 1.0], name)])
    assert len(result.write(tmp_path)) == 3
    assert "\x1b" not in str(result.table())
    assert json.loads(result.to_json())["ranges"][0]["name"] == name


# Quantization.


def test_quantization_covers_the_range_and_hits_zero() -> None:
    scale, zero = made([-1.0, 0.0, 3.0]).quantization(8)
    assert scale == pytest.approx(4 / 255)
    assert scale * (0 - zero) == pytest.approx(-1, abs=scale / 2)
    assert scale * (255 - zero) == pytest.approx(3, abs=scale / 2)
    scale, zero = made([2.0, 4.0]).quantization(4)
    assert scale == pytest.approx(4 / 15)
    assert zero == 0
    assert made([0.0, 0.0]).quantization() == (1.0, 0)


def test_quantization_by_percentiles() -> None:
    values = np.append(np.linspace(-1, 1, 1001), 1000.0)
    found = made(values)
    scale, _ = found.quantization(8, clip=99.0)
    assert scale == pytest.approx(2 / 255, rel=0.05)
    with pytest.raises(ValueError, match="record the percentiles 5 and 95"):
        found.quantization(8, clip=95.0)
