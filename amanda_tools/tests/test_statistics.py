"""Statistics of tensors equal NumPy's, also for numbers whose squares overflow."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from amanda_tools.kit.tensors import statistics
from amanda_tools.kit.tensors.statistics import statistics_of
from amanda_tools.kit.tensors.values import HostTensor


@pytest.mark.parametrize("bins", [1, 3, 16, 32, 33, 100])
@pytest.mark.parametrize("seed", range(5))
def test_histograms_are_those_of_numpy(seed: int, bins: int) -> None:
    values = np.random.default_rng(seed).normal(size=1000)
    values[:200] = np.linspace(values.min(), values.max(), 2 * bins + 1)[np.arange(200) % bins]
    found = statistics_of(HostTensor(values, "float64"), bins)
    assert found.histogram == np.histogram(values, bins)[0].tolist()
    assert {type(number) for number in (found.zeros, found.nan, *found.histogram)} == {int}


def test_figures_of_large_numbers() -> None:
    found = statistics_of(HostTensor(np.asarray([1e300, -1e300]), "float64"))
    assert (found.mean, found.std) == (0, 1e300)
    assert found.norm == pytest.approx(2**0.5 * 1e300)
    assert statistics_of(HostTensor(np.full(9, 1.7e308), "float64")).norm is None
    empty = statistics_of(HostTensor(np.zeros(0), "float64"), 4)
    assert (empty.count, empty.mean, empty.histogram) == (0, None, [])


def test_large_tensors_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "PART", 1000)
    values = np.random.default_rng(0).normal(size=(101, 99)).astype(np.float32)
    values[:30] = np.nan
    values[60] = np.inf
    found = statistics_of(HostTensor(values.T, "float32"), 16)
    finite = values[np.isfinite(values)].astype(np.float64)
    assert (found.count, found.nan, found.inf) == (values.size, 30 * 99, 99)
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.histogram == np.histogram(finite, 16)[0].tolist()
    expected = finite.mean(), finite.std(), np.linalg.norm(finite)
    assert (found.mean, found.std, found.norm) == pytest.approx(expected)


def test_statistics_of_a_large_tensor_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "PART", 1000)
    tensor = HostTensor(np.ones(1 << 20, np.int8), "int8")
    tracemalloc.start()
    statistics_of(tensor, 16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < tensor.array.nbytes


@pytest.mark.parametrize("middle", [1.0, -3.0, 1e-300, 1.7e308])
@pytest.mark.parametrize("steps", [1, 2, 5, 1000])
def test_histograms_of_neighbouring_numbers(middle: float, steps: int) -> None:
    """NumPy refuses more bins than there are numbers in a range, but counts their places there."""
    places = np.asarray([0, 0, steps, *range(steps)])
    values = middle + places * abs(np.spacing(middle))
    found = statistics_of(HostTensor(values, "float64"), 16)
    assert found.histogram == np.histogram(places, 16)[0].tolist()
