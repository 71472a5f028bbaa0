"""Short ways to make what nearly every test needs: tools of one action on one op type."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from amanda_core.testing.kit.tools import Routine


def noting(into: list[Any], routine: Routine) -> Routine:
    """Return a routine of one value that also stores its argument."""

    def noted(value: Any) -> Any:
        into.append(value)
        return routine(value)

    return noted


def normal(*shape: int, seed: int = 0) -> tf.Tensor:
    """Return a random tensor that was made by no op."""
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return tf.constant(values)


def variable(*shape: int, seed: int = 0) -> tf.Variable:
    """Return a random variable."""
    return tf.Variable(normal(*shape, seed=seed))


def numpy(value: Any) -> Any:
    """Convert a tensor, or slices of one, to an array."""
    return tf.convert_to_tensor(value).numpy()


def equal(actual: Any, expected: Any) -> None:
    """Compare values, shapes and dtypes of tensors bit by bit; None equals None."""
    tf.nest.map_structure(_equal, actual, expected)


def _equal(actual: Any, expected: Any) -> None:
    if expected is None or actual is None:
        assert actual is expected
        return
    left, right = numpy(actual), numpy(expected)
    assert left.dtype == right.dtype
    np.testing.assert_array_equal(left, right)


def close(actual: Any, expected: Any) -> None:
    """Compare tensors whose sums may have another order."""
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=1e-5, atol=1e-6)
