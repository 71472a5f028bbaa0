"""The sketch against NumPy's own percentiles and histograms."""

from __future__ import annotations

import numpy as np
import pytest

from activation_ranges.sketch import Floats, Sketch

GENERATOR = np.random.default_rng(0)
SAMPLES = {
    "normal": GENERATOR.normal(size=20_000),
    "relu": np.maximum(GENERATOR.normal(size=20_000), 0),
    "wide": GENERATOR.normal(size=20_000) * 10.0 ** GENERATOR.integers(-30, 30, 20_000),
    "negative": -GENERATOR.exponential(size=20_000) - 1,
    "whole": GENERATOR.integers(-100, 100, 20_000).astype(float),
    "tiny": GENERATOR.normal(size=20_000) * 5e-324 * 2**20,
    "one": np.full(10, -3.5),
    "zero": np.zeros(10),
}


def sketch_of(values: Floats) -> Sketch:
    sketch = Sketch()
    for part in np.array_split(values, 7):
        sketch.add(part)
    return sketch


@pytest.mark.parametrize("name", SAMPLES)
def test_percentiles_are_within_a_bucket(name: str) -> None:
    values = SAMPLES[name]
    wanted = [0, 0.1, 1, 25, 50, 75, 99, 99.9, 100]
    found = sketch_of(values).percentiles(wanted, values.min(), values.max())
    assert found == sorted(found)
    for percentile, value in zip(wanted, found, strict=True):
        # Between the neighbours that NumPy would choose from, up to the width of a bucket.
        below = np.percentile(values, percentile, method="lower")
        above = np.percentile(values, percentile, method="higher")
        lowest = below - abs(below) / 64
        highest = above + abs(above) / 64
        assert lowest <= value <= highest, percentile


@pytest.mark.parametrize("name", SAMPLES)
def test_histograms_count_all(name: str) -> None:
    values = SAMPLES[name]
    edges, counts = sketch_of(values).histogram(50, values.min(), values.max())
    assert counts.sum() == pytest.approx(values.size)
    assert (counts >= 0).all()
    assert (edges[0], edges[-1]) == (values.min(), values.max())


def test_histograms_have_the_form_of_numpys() -> None:
    values = SAMPLES["normal"]
    _, counts = sketch_of(values).histogram(20, values.min(), values.max())
    exact, _ = np.histogram(values, 20)
    assert np.abs(counts - exact).sum() < 0.03 * values.size


def test_the_order_of_parts_does_not_matter() -> None:
    values = SAMPLES["wide"]
    one, other = sketch_of(values), sketch_of(values[::-1])
    ends = values.min(), values.max()
    for found, expected in zip(one.histogram(30, *ends), other.histogram(30, *ends), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert one.nbytes == other.nbytes


def test_memory_is_bounded() -> None:
    sketch = Sketch()
    for _ in range(20):
        sketch.add(GENERATOR.normal(size=10_000))
    assert sketch.total == 200_000
    # Two signs, some twenty powers of two of 64 parts, 8 bytes each.
    assert sketch.nbytes < 2 * 30 * 64 * 8


def test_nothing() -> None:
    sketch = Sketch()
    sketch.add(np.empty(0))
    assert sketch.total == 0
    edges, counts = sketch.histogram(10, 0.0, 0.0)
    assert edges.size == counts.size == 0
