"""Each test starts with the same random numbers and leaves no tool applied."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import tensorflow as tf

from amanda_driver_tf._shared.state import STATE


@pytest.fixture(autouse=True)
def _same_start_and_nothing_left() -> Iterator[None]:
    tf.random.set_seed(0)
    yield
    assert STATE.functions is None
    assert STATE.graphs is None
    assert not STATE.quiet
    assert not STATE.running
    assert STATE.saved_results is None
    assert STATE.passed_results is None
