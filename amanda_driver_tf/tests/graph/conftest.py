"""Each test starts with the same random numbers and leaves no tool applied."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import tensorflow as tf
from tensorflow.python.client import session as session_module

from amanda_driver_tf._shared.state import STATE

from .loop_programs import control_flow

_METHODS = {
    name: value
    for owner in (session_module.BaseSession, session_module.Session, tf.Graph)
    for name, value in vars(owner).items()
}


@pytest.fixture(autouse=True)
def _same_start_and_nothing_left() -> Iterator[None]:
    tf.random.set_seed(0)
    yield
    assert STATE.functions is None
    assert STATE.graphs is None
    assert not STATE.quiet
    assert not STATE.running
    found = {
        name: value
        for owner in (session_module.BaseSession, session_module.Session, tf.Graph)
        for name, value in vars(owner).items()
    }
    assert {name for name in found if found[name] is not _METHODS.get(name)} == set()


@pytest.fixture
def old_control_flow() -> Iterator[None]:
    """Use the loops and branches of TensorFlow 1, made of switches and merges."""
    with control_flow(False):
        yield
