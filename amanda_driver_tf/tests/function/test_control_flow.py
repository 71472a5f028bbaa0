"""Loops and branches as users write them; recurrent layers.

A little over 400 lines: one subject.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import Everywhere, before, tool, watching

from ..comparison import close
from .handwritten_programs import EDITED, half
from .reference_programs import outside, straight, values

X, W, V = values((2, 3), (3, 3), (3, 3))
XS = values((4, 2, 3))[0]
# The mark of a staged routine stays on the function.
STAGED = before("MatMul", amanda.staged(lambda value: half(value)), 1)


def compare(program: Callable[..., Any], reference: Callable[..., Any], *given: Any) -> None:
    wanted = outside(reference, *given)
    for chosen in (EDITED, STAGED):
        with amanda.apply(chosen):
            close(outside(tf.function(program), *given), wanted)
    with amanda.apply(EDITED):
        close(tf.function(lambda *v: outside(program, *v))(*given), wanted)


def edited(w: Any) -> Any:
    return straight(w, half)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_of_several_branches(index: int) -> None:
    def branches(w: Any, x: Any) -> list[Callable[[], Any]]:
        return [
            lambda: tf.matmul(x, w),
            lambda: tf.tanh(tf.matmul(x, w)),
            lambda: tf.matmul(tf.exp(x), w),
        ]

    compare(
        lambda i, x, w: tf.reduce_sum(tf.switch_case(i, branches(w, x))),
        lambda i, x, w: tf.reduce_sum(branches(edited(w), x)[int(i)]()),
        tf.constant(index),
        X,
        W,
    )


@pytest.mark.slow
@pytest.mark.parametrize("other", ["another shape", "nothing edited", "another dtype"])
def test_branches_that_do_not_look_alike(other: str) -> None:
    def branch(x: Any) -> Any:
        if other == "another shape":
            return tf.reduce_sum(tf.matmul(tf.concat([x, x], 0), V))
        if other == "nothing edited":
            return tf.reduce_sum(x)
        return tf.cast(tf.reduce_sum(tf.matmul(tf.cast(x, tf.float32), tf.ones((3, 1)))), x.dtype)

    for bound in (1e9, -1e9):

        def program(x: Any, w: Any, bound: float = bound) -> Any:
            return tf.cond(
                tf.reduce_sum(x) < bound,
                lambda: tf.reduce_sum(tf.tanh(tf.matmul(x, w)) ** 2),
                lambda: branch(x),
            )

        def reference(x: Any, w: Any, bound: float = bound) -> Any:
            if bound > 0:
                return tf.reduce_sum(tf.tanh(tf.matmul(x, edited(w))) ** 2)
            if other == "another shape":
                return tf.reduce_sum(
                    tf.matmul(tf.concat([x, x], 0), edited(V))
                ) + 0 * tf.reduce_sum(w)
            if other == "nothing edited":
                return tf.reduce_sum(x) + 0 * tf.reduce_sum(w)
            ones = half(tf.ones((3, 1)))
            total = tf.reduce_sum(tf.matmul(tf.cast(x, tf.float32), ones))
            return tf.cast(total, x.dtype) + 0 * tf.reduce_sum(w)

        compare(program, reference, X, W)


def test_scan() -> None:
    def reference(xs: Any, w: Any) -> Any:
        state, states = xs[0], [xs[0]]
        for x in tf.unstack(xs)[1:]:
            state = tf.tanh(tf.matmul(state, edited(w)) + x)
            states.append(state)
        return tf.reduce_sum(tf.stack(states) ** 2)

    compare(
        lambda xs, w: tf.reduce_sum(tf.scan(lambda a, x: tf.tanh(tf.matmul(a, w) + x), xs) ** 2),
        reference,
        XS,
        W,
    )


def test_map() -> None:
    compare(
        lambda xs, w: tf.reduce_sum(tf.map_fn(lambda x: tf.tanh(tf.matmul(x, w)), xs) ** 2),
        lambda xs, w: tf.add_n(
            [tf.reduce_sum(tf.tanh(tf.matmul(x, edited(w))) ** 2) for x in tf.unstack(xs)]
        ),
        XS,
        W,
    )


def test_vectorized_map() -> None:
    wanted = tf.stack([tf.matmul(x, half(W)) for x in tf.unstack(XS)])
    seen, watch = watching()
    with amanda.apply(watch):
        close(
            tf.function(lambda xs: tf.vectorized_map(lambda x: tf.matmul(x, half(W)), xs))(XS),
            wanted,
        )
    assert any("MatMul" in op_type for op_type in seen)


@pytest.mark.slow
def test_loops_that_autograph_makes() -> None:
    def program(x: Any, w: Any) -> Any:
        for _ in tf.range(3):
            if tf.reduce_sum(x) > 0:
                x = tf.tanh(tf.matmul(x, w))
            else:
                x = tf.sin(tf.matmul(x, w)) + 1
        total = tf.zeros((), x.dtype)
        while total < 2:
            total += tf.reduce_sum(tf.abs(tf.matmul(x, w)))
        return total

    def reference(x: Any, w: Any) -> Any:
        for _ in range(3):
            if tf.reduce_sum(x) > 0:
                x = tf.tanh(tf.matmul(x, edited(w)))
            else:
                x = tf.sin(tf.matmul(x, edited(w))) + 1
        total = tf.zeros((), x.dtype)
        while total < 2:
            total += tf.reduce_sum(tf.abs(tf.matmul(x, edited(w))))
        return total

    compare(program, reference, X, W)


@pytest.mark.parametrize("times", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_loops_of_any_length(times: int) -> None:
    def program(x: Any, w: Any) -> Any:
        limit = tf.reduce_sum(tf.zeros_like(x, tf.int32)) + times
        return tf.reduce_sum(
            tf.while_loop(
                lambda i, _: i < limit,
                lambda i, x: (i + 1, tf.tanh(tf.matmul(x, w))),
                (0, x),
                maximum_iterations=10,
            )[1]
        )

    def reference(x: Any, w: Any) -> Any:
        for _ in range(times):
            x = tf.tanh(tf.matmul(x, edited(w)))
        return tf.reduce_sum(x) + 0 * tf.reduce_sum(w)

    compare(program, reference, X, W)


def test_an_op_of_the_condition() -> None:
    # The condition reads no gradient; an edit in it steers the loop.
    function = tf.function(
        lambda x: tf.while_loop(lambda x: tf.reduce_max(x) < 8, lambda x: (x * 2,), (x,))[0]
    )
    x = tf.constant([1.0, 0.5])
    with amanda.apply(before("Max", lambda t: t * 4, 0)):
        close(function(x), tf.constant([2.0, 1.0]))
    close(function(x), tf.constant([8.0, 4.0]))


def test_tensor_arrays() -> None:
    def program(x: Any, w: Any) -> Any:
        array = tf.TensorArray(x.dtype, size=3)
        for i in tf.range(3):
            x = tf.tanh(tf.matmul(x, w))
            array = array.write(i, x)
        return tf.reduce_sum(array.stack() ** 2)

    def reference(x: Any, w: Any) -> Any:
        total = tf.zeros((), x.dtype)
        for _ in range(3):
            x = tf.tanh(tf.matmul(x, edited(w)))
            total += tf.reduce_sum(x**2)
        return total

    compare(program, reference, X, W)


def test_a_tape_in_the_body_of_a_loop() -> None:
    def step(x: Any, w: Any, layer: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(layer(x, w) ** 2)
        return x - 0.1 * tape.gradient(y, x)

    def program(x: Any, w: Any) -> Any:
        body = lambda i, x: (i + 1, step(x, w, lambda x, w: tf.tanh(tf.matmul(x, w))))  # noqa: E731
        return tf.reduce_sum(tf.while_loop(lambda i, _: i < 3, body, (0, x))[1])

    def reference(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = step(x, w, lambda x, w: tf.tanh(tf.matmul(x, edited(w))))
        return tf.reduce_sum(x)

    wanted = reference(X, W)
    with amanda.apply(EDITED):
        close(tf.function(program)(X, W), wanted)
    compare(program, reference, X, W)


# Recurrent layers: each gate's weights are edited where the layer's loop reads them.


class _Gates:
    """The formulas of Keras' recurrent layers over edited weights."""

    @staticmethod
    def simple(x: Any, h: Any, k: Any, r: Any, b: Any) -> Any:
        return tf.tanh(x @ edited(k) + b + h[0] @ edited(r)), None

    @staticmethod
    def lstm(x: Any, state: Any, k: Any, r: Any, b: Any) -> Any:
        h, c = state
        i, f, g, o = tf.split(x @ edited(k) + h @ edited(r) + b, 4, 1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        return tf.sigmoid(o) * tf.tanh(c), c


@pytest.mark.parametrize("kind", ["SimpleRNN", "LSTM"])
def test_recurrent_layers(kind: str) -> None:
    keras.utils.set_random_seed(0)
    layer = getattr(keras.layers, kind)(3)
    sequence = tf.cast(XS, tf.float32)
    layer(sequence)
    function = tf.function(lambda xs: tf.reduce_sum(layer(xs) ** 2))

    def reference() -> list[Any]:
        weights = [tf.convert_to_tensor(w) for w in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            h = c = tf.zeros((4, 3))
            for x in tf.unstack(sequence, axis=1):
                formula = _Gates.simple if kind == "SimpleRNN" else _Gates.lstm
                h, c = formula(x, (h, c), *weights)
            y = tf.reduce_sum(h**2)
        return [y, *tape.gradient(y, weights)]

    wanted = reference()
    with amanda.apply(EDITED), tf.GradientTape() as tape:
        y = function(sequence)
    close([y, *tape.gradient(y, layer.trainable_variables)], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [False, True], ids=["watched", "copied"])
@pytest.mark.parametrize("form", ["outside", "inside"])
def test_every_op_of_a_recurrent_layer_can_be_watched(form: str, copies: bool) -> None:
    layer = keras.layers.GRU(3)
    sequence = tf.cast(XS, tf.float32)
    layer(sequence)
    function: Any = lambda xs: tf.reduce_sum(layer(xs) ** 2)  # noqa: E731
    if form == "outside":
        function = tf.function(function)

    def run() -> list[Any]:
        with tf.GradientTape() as tape:
            y = function(sequence)
        return [y, *tape.gradient(y, layer.trainable_variables)]

    if form == "inside":
        run = tf.function(run)

    def copy(value: Any) -> Any:
        return value if value is None or value.dtype == tf.variant else tf.identity(value)

    def again(*values: Any) -> Any:
        return tf.nest.map_structure(copy, values) if copies else values

    wanted = run()
    with amanda.apply(Everywhere(again)):
        close(run(), wanted)


def steps_over_data(w: tf.Variable, dataset: Any, stops: bool) -> Callable[[], Any]:
    """Run gradient descent over a data set, whose loop AutoGraph compiles to a function."""

    @tf.function  # type: ignore[untyped-decorator]
    def train() -> Any:
        total = tf.constant(0.0)
        for number, item in dataset.enumerate():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.sin(w * item))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            total += loss
            if stops and number == 2:
                break
        return total

    return train  # type: ignore[no-any-return]


@pytest.mark.parametrize("stops", [False, True], ids=["all", "break"])
def test_loops_over_data(stops: bool) -> None:
    items = np.arange(8, dtype=np.float32).reshape(4, 2)
    w = tf.Variable([1.0, 2.0])
    train = steps_over_data(w, tf.data.Dataset.from_tensor_slices(items), stops)
    plain = [float(train()), w.numpy()]
    seen: list[int] = []

    def edit(context: amanda.OpContext) -> None:
        context.insert_before_op(half)
        context.insert_after_op(lambda value: seen.append(1))
        context.insert_after_backward_op(lambda gradient: gradient * 3)

    w.assign([1.0, 2.0])
    with amanda.apply(tool(edit, "Sin")):
        found = [float(train()), w.numpy()]
    weight, total = np.array([1.0, 2.0], np.float32), 0.0
    for item in items[:3] if stops else items:
        total += float(np.sin(half(weight * item)).sum())
        weight = weight - 0.1 * 3 * np.cos(half(weight * item)) * item
    np.testing.assert_allclose(found[0], total, rtol=1e-5)
    np.testing.assert_allclose(found[1], weight, rtol=1e-5)
    assert len(seen) == (3 if stops else 4)
    w.assign([1.0, 2.0])
    assert float(train()) == plain[0]
    assert w.numpy().tolist() == plain[1].tolist()


def test_exceptions_in_loops_over_data() -> None:
    w = tf.Variable([1.0, 2.0])
    train = steps_over_data(w, tf.data.Dataset.from_tensor_slices(np.ones((2, 2), "f")), False)
    with (
        amanda.apply(before("Sin", lambda value: [].pop())),
        pytest.raises(IndexError) as caught,
    ):
        train()
    assert "Sin'" in "".join(caught.value.__notes__)
    assert np.isfinite(float(train()))


def test_loops_that_use_functions_as_op_types() -> None:
    """`tf.nn.ctc_loss` does so. Its loops are skipped; the ops around them are edited."""
    labels, lengths = tf.constant([[1, 2], [2, 1]]), [6, 6]
    x, w = values((6, 2, 3), (3, 4), dtype=tf.float32)

    def program(x: Any, w: Any, weight: Any) -> Any:
        logits = tf.reshape(tf.matmul(tf.reshape(x, [12, 3]), weight(w)), [6, 2, 4])
        return tf.reduce_sum(tf.nn.ctc_loss(labels, logits, [2, 2], lengths, blank_index=0))

    function = tf.function(lambda x, w: program(x, w, lambda w: w))
    wanted = outside(lambda x, w: program(x, w, lambda w: straight(w, half)), x, w)
    # Not `EDITED`: TensorFlow never forgets this function, and a tool its twins.
    with amanda.apply(before("MatMul", half, 1)) as handle:
        close(outside(function, x, w), wanted)
        unseen = [each.what for each in handle.coverage()["tensorflow"]]
    assert "functions used as op types" in unseen


@pytest.mark.parametrize("op", ["Relu", "ReadVariableOp"])
def test_a_routine_before_an_op_runs_after_what_the_op_waits_for(op: str) -> None:
    order: list[str] = []
    variable = tf.Variable(0.0)

    def compute() -> Any:
        order.append("waited for")
        return np.float32(7.0)

    @tf.function  # type: ignore[untyped-decorator]
    def program() -> Any:
        with tf.control_dependencies([variable.assign(tf.numpy_function(compute, [], tf.float32))]):
            return tf.nn.relu(tf.ones(2)) if op == "Relu" else variable.read_value()

    with amanda.apply(before(op, lambda *values: order.append("routine"))):
        for _ in range(3):
            order.clear()
            program()
            assert order == ["waited for", "routine"]
