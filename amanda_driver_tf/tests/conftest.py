"""Each test starts with the same random numbers and leaves no tool applied.

TensorFlow's import takes ten seconds. The process that only distributes the tests, and those that
run tests without TensorFlow, load this module, too; so functions import it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from amanda_driver_tf.threads import STATE


def pytest_pycollect_makemodule() -> None:
    """Set up TensorFlow before the first module of this folder is imported."""
    _set_threads()


@functools.cache
def _set_threads() -> None:
    """Set the threads before TensorFlow makes them; sums of one run then are those of the next."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)


@pytest.fixture(autouse=True)
def _same_start_and_nothing_left() -> Iterator[None]:
    import tensorflow as tf

    tf.random.set_seed(0)
    yield
    assert STATE.functions is None
    assert STATE.graphs is None
    assert not STATE.quiet
    assert not STATE.running
    assert STATE.eager is None
    assert STATE.first_run is None
    assert not STATE.fallbacks
