"""Distance between two tensors: measures, tolerances, integers, orders of axes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from amanda_tools.diff.numbers import Difference, Tolerance, compare_tensors
from amanda_tools.kit.tensors.values import HostTensor


def host(values: Any, dtype: str = "float32") -> HostTensor:
    return HostTensor(np.asarray(values, dtype), dtype)


def measure(one: HostTensor, other: HostTensor, **tolerance: Any) -> Difference:
    found = compare_tensors(one, other, Tolerance(**tolerance))
    assert found is not None
    return found


def test_measures() -> None:
    x = np.asarray([[1.0, 2.0], [4.0, 8.0]], np.float32)
    y = x.copy()
    y[1, 0] = np.nextafter(np.nextafter(y[1, 0], 9, dtype=np.float32), 9, dtype=np.float32)
    found = measure(host(x), host(y))
    assert (found.within, found.equal, found.ulp) == (True, False, 2)
    assert found.max_abs == 2 * 2.0**-21
    assert found.max_rel == pytest.approx(2 * 2.0**-23)
    found = measure(host(x), host(y), relative=0, absolute=0)
    assert (found.within, found.first, found.beyond, found.count) == (False, [1, 0], 1, 4)
    assert found.cosine == pytest.approx(1)
    # The next number of the coarser dtype.
    next_to_one = HostTensor(np.asarray([0x3F81], np.uint16), "bfloat16")
    assert measure(host([1.0]), next_to_one).ulp == 1
    assert measure(host([1.0, 0.0]), host([0.0, 1.0])).cosine == 0
    assert measure(host([1.0]), host([-1.0])).cosine == -1


def test_values_that_are_not_finite() -> None:
    nan, inf = math.nan, math.inf
    assert measure(host([nan, inf, -inf]), host([nan, inf, -inf])).within
    for one, other in ((nan, 1.0), (inf, 1.0), (inf, -inf), (inf, nan)):
        found = measure(host([2.0, one]), host([2.0, other]), relative=9, absolute=9)
        assert (found.within, found.first, found.max_abs) == (False, [1], 0)
        json.dumps(found.max_rel, allow_nan=False)


def test_whole_numbers_and_truth_values() -> None:
    large = 2**62
    found = measure(host([large, 1], "int64"), host([large + 1, 1], "int64"))
    assert (found.within, found.ulp, found.values) == (False, None, [str(large), str(large + 1)])
    found = measure(host([True], "bool"), host([False], "bool"))
    assert (found.within, found.max_abs) == (False, 1)
    assert measure(host([1], "int64"), host([1.0])).within
    found = measure(host([1 + 2j], "complex64"), host([1 + 3j], "complex64"))
    assert (found.max_abs, found.within) == (1, False)


def test_orders_of_axes() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    moved = host(np.ascontiguousarray(x.transpose(0, 2, 3, 1)))
    assert compare_tensors(host(x), moved, Tolerance()) is None
    for layouts in ((None, None), ("NCHW", "NHWC")):
        found = compare_tensors(host(x), moved, Tolerance(), layouts, across=True)
        assert found is not None
        assert (found.equal, found.order) == (True, [0, 3, 1, 2])
    filters = host(np.ascontiguousarray(x.transpose(2, 3, 1, 0)))
    found = compare_tensors(host(x), filters, Tolerance(), ("OIHW", "HWIO"), across=True)
    assert found is not None
    assert (found.equal, found.order) == (True, [3, 2, 0, 1])
    # Where all axes are as long, it is the order in which they agree.
    cube = np.random.default_rng(0).normal(size=(3, 3, 3)).astype(np.float32)
    found = compare_tensors(host(cube), host(cube.transpose(0, 2, 1)), Tolerance(), across=True)
    assert found is not None
    assert found.equal
    difference = cube.copy()
    difference[1, 2, 0] += 1
    found = compare_tensors(
        host(cube), host(difference.transpose(0, 2, 1)), Tolerance(), across=True
    )
    assert found is not None
    assert (found.first, found.beyond) == ([1, 2, 0], 1)
