"""The finder of what is not finite in TensorFlow's modes."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.nonfinite import NonFinite, NonFiniteError, NonFiniteResult

v1 = tf.compat.v1
MODES = ["eager", "function", "session"]
modes = pytest.mark.parametrize("mode", MODES)


def run(mode: str, program: Callable[..., Any], x: Any) -> None:
    """Run a program of one input."""
    if mode == "eager":
        program(tf.constant(x))
    elif mode == "function":
        tf.function(program)(tf.constant(x))
    else:
        with tf.Graph().as_default(), v1.Session() as session:
            fed = v1.placeholder(x.dtype, x.shape)
            fetched = program(fed)
            session.run(v1.global_variables_initializer())
            session.run(fetched, {fed: x})


def find(mode: str, program: Callable[..., Any], x: Any, **options: Any) -> NonFiniteResult:
    tool = NonFinite(**options)
    with amanda.apply(tool):
        run(mode, program, x)
    return tool.result()


def array(*values: float, dtype: Any = np.float32) -> Any:
    return np.asarray(values, dtype)


def masked_softmax(x: Any) -> Any:
    scores = tf.where(x > 0, x, -float("inf"))
    return tf.nn.softmax(scores) + 1.0


#: Name -> program, input, type of the operator to blame, kind.
PLANTED: dict[str, tuple[Callable[..., Any], Any, str, str]] = {
    "log of zero": (lambda x: tf.math.log(x) * 2.0, array(0, 1), "Log", "inf"),
    "zero by zero": (lambda x: x / x + 1.0, array(0, 1), "RealDiv", "nan"),
    "half overflow": (
        lambda x: x * x + x,
        array(300, 1, dtype=np.float16),
        "Mul",
        "inf",
    ),
    "cast": (lambda x: tf.cast(x, tf.float16) * 2, array(1e30, 1), "Cast", "inf"),
    "exponential": (lambda x: tf.exp(x) + 1.0, array(100, 1), "Exp", "inf"),
    "infinity less infinity": (lambda x: (x - x) * 2.0, array(float("inf"), 1), "Sub", "nan"),
    "zero deviation": (
        lambda x: (x - tf.reduce_mean(x)) / tf.math.reduce_std(x) + 1.0,
        array(1, 1),
        "RealDiv",
        "nan",
    ),
    "softmax of nothing": (masked_softmax, array(-1, -1), "Softmax", "nan"),
}


@modes
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults(name: str, mode: str) -> None:
    program, x, kind_of_op, kind = PLANTED[name]
    first = find(mode, program, x).first
    assert first is not None
    # Eager subtraction and division are the same operators by other routes.
    assert first.type.rstrip("V2") == kind_of_op
    assert (first.origin, first.kind, first.calls) == ("operator", kind, 1)
    assert first.source is not None
    file, _, line = first.source.rpartition(":")
    assert file.endswith("test_nonfinite.py")
    code = program.__code__
    assert code.co_firstlineno <= int(line) <= max(end for *_, end in code.co_lines() if end)
    assert any(output.first is not None for output in first.outputs)


@modes
def test_a_gradient(mode: str) -> None:
    def program(x: Any) -> Any:
        if mode == "session":
            return v1.gradients(tf.sqrt(x), x)[0] * 2.0
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sqrt(x)
        return tape.gradient(y, x)

    first = find(mode, program, array(0, 1)).first
    assert first is not None
    assert (first.origin, first.kind, first.type, first.what) == (
        "gradient",
        "inf",
        "Sqrt",
        "SqrtGrad",
    )
    assert first.source is not None
    assert "test_nonfinite.py" in first.source


@modes
def test_a_variable(mode: str) -> None:
    table = np.ones((3, 2), np.float32)
    table[1] = np.nan
    made: list[Any] = []

    def program(x: Any) -> Any:
        if not made:
            made.append(
                v1.get_variable("table", initializer=table, use_resource=True)
                if mode == "session"
                else tf.Variable(table, name="table")
            )
        return tf.nn.embedding_lookup(made[0], tf.cast(x, tf.int32)) * 2.0

    if mode != "session":
        made.append(tf.Variable(table, name="table"))
    found = find(mode, program, array(1, 2))
    (fault,) = found.faults
    assert (fault.origin, fault.kind, fault.type) == ("parameter", "nan", "ResourceGather")
    assert found.passed_on >= 1


@modes
def test_data_and_masks(mode: str) -> None:
    found = find(mode, lambda x: tf.nn.relu(x * 2.0) + 1.0, array(1, float("nan")))
    assert [(f.origin, f.type) for f in found.faults] == [("data", "Mul")]
    masked = find(mode, lambda x: masked_softmax(x) * 2.0, array(-1, 1))
    assert masked.faults == []
    assert masked.passed_on >= 1


@modes
def test_raising(mode: str) -> None:
    with pytest.raises(NonFiniteError, match="'Log'"):
        find(mode, lambda x: tf.math.log(x) * 2.0, array(0, 1), action="raise")


@modes
def test_bfloat16_and_complex(mode: str) -> None:
    def program(x: Any) -> Any:
        small = tf.cast(x, tf.bfloat16)
        number = tf.complex(x, x)
        return tf.cast(small / small, tf.float32), tf.math.real(tf.exp(number))

    found = find(mode, program, array(0, 100))
    assert [(f.type, f.kind) for f in sorted(found.faults, key=lambda f: f.type)] == [
        ("Exp", "inf"),
        ("RealDiv", "nan"),
    ]
    assert found.unchecked == {}
