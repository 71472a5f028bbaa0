"""The tool on every installed framework, and on unusual values."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

import amanda
from activation_ranges import ActivationRanges, Range, Ranges

from .frameworks import FRAMEWORKS, expected

MATRIX = pytest.mark.parametrize("name", FRAMEWORKS)


def range_of(ranges: Ranges, word: str) -> Range:
    (found,) = [each for each in ranges.ranges if each.word == word]
    return found


def test_some_framework_is_there() -> None:
    assert FRAMEWORKS


@MATRIX
def test_ranges_are_those_of_numpy(name: str) -> None:
    framework = FRAMEWORKS[name]()
    tool = ActivationRanges(percentiles=(0, 50, 100))
    plain = framework.run()
    with amanda.apply(tool):
        for _ in range(3):
            np.testing.assert_array_equal(framework.run(), plain)
    for word, values in expected().items():
        found = range_of(tool.result(), word)
        assert found.namespace.startswith(f"{framework.driver}/")
        assert (found.lowest, found.highest) == (values.min(), values.max())
        assert found.executions == 3
        assert found.elements == 3 * values.size
        assert found.mean == pytest.approx(values.mean(), rel=1e-6)
        assert found.zeros == pytest.approx((values == 0).mean())
        assert (found.nan, found.infinite) == (0, (0, 0))
        assert found.percentiles[0] == values.min()
        assert found.percentiles[100] == values.max()
        assert sum(found.counts) == pytest.approx(3 * values.size)


@MATRIX
def test_only_the_operators_asked_for(name: str) -> None:
    framework = FRAMEWORKS[name]()
    tool = ActivationRanges(types=["relu"])
    with amanda.apply(tool):
        framework.run()
    assert [each.word for each in tool.result().ranges] == ["relu"]


@MATRIX
def test_tools_applied_again_go_on(name: str) -> None:
    framework = FRAMEWORKS[name]()
    tool = ActivationRanges(types=["relu"])
    for _ in range(2):
        with amanda.apply(tool):
            framework.run()
    (found,) = tool.result().ranges
    assert found.executions == 2


@MATRIX
def test_one_range_for_each_module(name: str) -> None:
    framework = FRAMEWORKS[name]()
    tool = ActivationRanges(types=["matmul", "relu"], by="module")
    with amanda.apply(tool):
        framework.run()
    (found,) = tool.result().ranges
    values = expected()
    assert found.lowest == values["matmul"].min()
    assert found.highest == values["relu"].max()
    assert found.elements == 2 * values["relu"].size
    assert found.title == "(outside modules)"


def test_nothing_seen() -> None:
    result = ActivationRanges().result()
    assert result.ranges == []
    assert json.loads(result.to_json())["ranges"] == []
    assert result.table().rows == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"types": ["convolve2d"]}, "types: no such operators: convolve2d"),
        ({"by": "layer"}, "by: 'layer' is neither op nor module"),
        ({"percentiles": [101]}, "percentiles: they go from 0 to 100"),
        ({"percentiles": [math.nan]}, "percentiles: they go from 0 to 100"),
        ({"bins": 0}, "bins: 0 is less than 1"),
        ({"sample": -1}, "sample: -1 is less than 1"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationRanges(**options)
