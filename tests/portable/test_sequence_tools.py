"""`capture` and `steer` on operators of TensorFlow, in every mode. Positions are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import SelectionError
from amanda_tools.capture import Capture
from amanda_tools.steer import Steer

X = np.arange(6, dtype=np.float32).reshape(2, 3) / 5


def doubled(x: Any) -> Any:
    return tf.tanh(x) * 2


def run(mode: str, *tools: amanda.Tool) -> Any:
    """Run the program in a mode."""
    if mode == "session":
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, X.shape)
            output = doubled(x)
        with tf.compat.v1.Session(graph=graph) as session, amanda.apply(*tools):
            return session.run(output, {x: X})
    program = doubled if mode == "eager" else tf.function(doubled)
    with amanda.apply(*tools):
        return program(tf.constant(X)).numpy()


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_values_of_operators_are_captured_and_steered(mode: str) -> None:
    capture = Capture(ops=["Tanh"])
    np.testing.assert_allclose(run(mode, capture), np.tanh(X) * 2, rtol=1e-6)
    found = capture.result()
    (value,) = found.values
    np.testing.assert_allclose(found.read(value), np.tanh(X), rtol=1e-6)
    vector = np.array([1, 2, 3], np.float32)
    steer = Steer("add", vector=vector, factor=0.5, ops=["Tanh"])
    np.testing.assert_allclose(run(mode, steer), (np.tanh(X) + vector / 2) * 2, rtol=1e-6)
    assert steer.result().changed == 1


def test_positions_are_refused() -> None:
    with pytest.raises(SelectionError, match="its driver does not tell positions"):
        run("eager", Steer("scale", factor=2.0, ops=["Tanh"], positions=[0]))
    capture = Capture(ops=["Tanh"], positions=[0])
    run("eager", capture)
    assert "its driver does not tell positions" in capture.result().left_out[0].reason
