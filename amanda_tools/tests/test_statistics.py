"""Statistics of tensors equal NumPy's, also for numbers whose squares overflow."""

from __future__ import annotations

import numpy as np
import pytest

from amanda_tools.tensors.statistics import statistics_of
from amanda_tools.tensors.values import HostTensor


@pytest.mark.parametrize("seed", range(5))
def test_histograms_are_those_of_numpy(seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=1000)
    found = statistics_of(HostTensor(values, "float64"), 16)
    assert found.histogram == np.histogram(values, 16)[0].tolist()


def test_figures_of_large_numbers() -> None:
    found = statistics_of(HostTensor(np.asarray([1e300, -1e300]), "float64"))
    assert (found.mean, found.std) == (0, 1e300)
    assert found.norm == pytest.approx(2**0.5 * 1e300)
    assert statistics_of(HostTensor(np.full(9, 1.7e308), "float64")).norm is None
    empty = statistics_of(HostTensor(np.zeros(0), "float64"), 4)
    assert (empty.count, empty.mean, empty.histogram) == (0, None, [])
