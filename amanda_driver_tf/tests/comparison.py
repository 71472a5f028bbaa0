"""Comparison of the results of two programs: tensors, slices, arrays, lists of these, None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.indexed_slices import IndexedSlicesValue


def dense(value: Any) -> Any:
    """Convert to an array; for slices, to their sum."""
    if isinstance(value, IndexedSlicesValue):
        rows = int(max(value.indices)) + 1 if value.dense_shape is None else value.dense_shape[0]
        full = np.zeros((int(rows), *value.values.shape[1:]), value.values.dtype)
        np.add.at(full, value.indices, value.values)
        return full
    if isinstance(value, (tf.Tensor, tf.IndexedSlices)):
        return tf.convert_to_tensor(value).numpy()
    return np.asarray(value)


def equal(actual: Any, expected: Any) -> None:
    """Compare values, shapes and dtypes bit by bit."""
    _compare(actual, expected, np.testing.assert_array_equal)


def close(actual: Any, expected: Any) -> None:
    """Compare values whose sums may have another order."""

    def near(found: Any, wanted: Any) -> None:
        if np.issubdtype(wanted.dtype, np.floating):
            assert np.isfinite(wanted).all(), "the expectation is not finite"
            fine = wanted.dtype == np.float64
            rtol, atol = (1e-9, 1e-10) if fine else (1e-5, 1e-6)
            np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(found, wanted)

    _compare(actual, expected, near)


def _compare(actual: Any, expected: Any, compare: Callable[[Any, Any], Any]) -> None:
    if isinstance(expected, (list, tuple)) and not isinstance(expected, IndexedSlicesValue):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            _compare(one, other, compare)
        return
    if expected is None or actual is None:
        assert actual is None
        assert expected is None
        return
    one, other = dense(actual), dense(expected)
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    compare(one, other)
