"""Each test starts with the same random numbers and leaves no tool applied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

from amanda_driver_tf._shared.state import STATE

# Before TensorFlow makes its threads; sums of one run then are those of the next.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


@pytest.fixture(autouse=True)
def _same_start_and_nothing_left() -> Iterator[None]:
    tf.random.set_seed(0)
    yield
    assert STATE.functions is None
    assert STATE.graphs is None
    assert not STATE.quiet
    assert not STATE.running
    assert STATE.eager is None
    assert STATE.first_run is None
    assert not STATE.fallbacks
