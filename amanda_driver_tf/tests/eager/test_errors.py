"""Exceptions of routines keep their type and say where they come from; the next run works."""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators
# TensorFlow and Keras have no types.

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import pytest
import tensorflow as tf

from amanda import OpContext, Tool, apply
from amanda_core.errors import AmandaError
from amanda_core.testing.kit.tools import (
    after,
    at_inputs,
    at_outputs,
    before,
    idle,
    replacing,
    replacing_backward,
    tool,
)

from .tensors import equal, normal
from .test_edits import gradient


class OwnError(Exception):
    """Cannot be made of one message, as Keras tries to."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)
        self.first = first


def fail(*values: Any) -> Any:
    raise OwnError(1, 2)


def raw(insert: str) -> Any:
    return tool(lambda c: getattr(c, insert)(fail), "TanhGrad", backward=True)


TOOLS: dict[str, Callable[[], Tool]] = {
    "before": lambda: before("Tanh", fail),
    "after": lambda: after("Tanh", fail),
    "replace": lambda: replacing("Tanh", fail),
    "at outputs": lambda: at_outputs("Tanh", fail),
    "at inputs": lambda: at_inputs("Tanh", fail),
    "replace backward": lambda: replacing_backward("Tanh", fail),
    "raw before": lambda: raw("insert_before_backward_op"),
    "raw after": lambda: raw("insert_after_backward_op"),
    "raw replace": lambda: raw("replace_backward_op"),
    "analysis": lambda: tool(fail, "Tanh"),
    "late analysis": lambda: tool(fail, "Tanh", require_outputs=True),
    "backward analysis": lambda: tool(fail, "TanhGrad", backward=True),
}


def model() -> Any:
    return keras.Sequential([keras.layers.Dense(2, activation="tanh", name="head")], name="net")


@pytest.mark.parametrize("point", TOOLS)
def test_own_exception_comes_out_with_a_note(point: str) -> None:
    net, x = model(), normal(3, 4)
    net(x)

    def run() -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(net(x))
        return tape.gradient(y, [v.value for v in net.trainable_variables])

    plain = run()
    with apply(TOOLS[point](), idle()):
        for _ in range(2):
            with pytest.raises(OwnError) as caught:
                run()
            notes = "".join(caught.value.__notes__)
            assert "fail" in notes or "chosen" in notes
            assert "net/head/Tanh" in notes
            assert "test_errors.py:" in notes
    equal(run(), plain)


@pytest.mark.parametrize("kind", [TypeError, ValueError])
@pytest.mark.parametrize("insert", [before, after, replacing])
def test_error_at_an_overloaded_operator_is_not_lost(kind: Any, insert: Any) -> None:
    x, y = normal(3), normal(3, seed=1)
    calls: list[int] = []

    def once(*values: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise kind("of the routine")
        return values[0]

    with pytest.raises(kind, match="of the routine"), apply(insert("AddV2", once)):
        _ = x + y


def test_keyboard_interrupt_goes_through() -> None:
    def interrupt(*values: Any) -> Any:
        raise KeyboardInterrupt

    for made in (before("Exp", interrupt), at_inputs("Exp", interrupt)):
        with pytest.raises(KeyboardInterrupt), apply(made):
            gradient(tf.exp, normal(3))


def test_errors_of_the_program_stay_as_they_are() -> None:
    x = normal(2, 3)
    with pytest.raises(tf.errors.InvalidArgumentError) as plain:
        tf.matmul(x, x)
    with apply(idle()):
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError) as mine:
                tf.matmul(x, x)
            # The fallback leaves out that the op was given no name.
            assert str(plain.value).startswith(str(mine.value))
        with pytest.raises(ValueError, match="unsupported type"):
            tf.nn.relu(object())
        with pytest.raises(tf.errors.InvalidArgumentError, match="string"):
            tf.matmul(x, "text")
        equal(tf.nn.relu(x), tf.nn.relu(x))


@pytest.mark.parametrize(
    "function",
    [
        *(tf.logical_and, tf.add, tf.matmul, tf.pow, tf.equal, tf.bitwise.bitwise_or, tf.gather),
        lambda a, b: tf.concat([a, b], 0),
        lambda a, b: tf.where(a, b, b),
        lambda a, b: tf.nn.relu(a) + tf.math.unsorted_segment_sum(a, b, 2),
    ],
)
def test_dtypes_that_do_not_fit_raise_as_without_tools(function: Any) -> None:
    values: list[Any] = [[[True]], [[1]], [[1.0]], [["a"]], tf.constant([[1]], tf.int64)]
    pairs = [(tf.constant(a), tf.constant(b)) for a in values for b in values]

    def errors() -> list[tuple[type[Exception], str] | None]:
        found: list[tuple[type[Exception], str] | None] = []
        for a, b in pairs:
            try:
                function(a, b)
                found.append(None)
            except Exception as error:  # Compared with those of the other run.
                found.append((type(error), str(error).partition(" [Op:")[0]))
        return found

    expected = errors()
    assert any(expected)
    for made in (idle(), tool(lambda c: c.insert_after_op(lambda *values: None))):
        with apply(made):
            assert errors() == errors() == expected


def test_failed_analysis_is_tried_again() -> None:
    x = normal(2)
    calls: list[int] = []

    def analyse(context: OpContext) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OwnError(1, 2)
        context.insert_before_op(lambda v: v * 0.0)

    with apply(tool(analyse, "Exp")):
        for attempt in range(3):
            with pytest.raises(OwnError) if attempt == 0 else nullcontext():
                equal(tf.exp(x), tf.ones(2))
    assert len(calls) == 2


def test_errors_of_amanda_pass_through_layers() -> None:
    net, x = model(), normal(3, 4)
    with pytest.raises(AmandaError), apply(before("Tanh", lambda v: "text")):
        net(x)
