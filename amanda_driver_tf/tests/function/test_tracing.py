"""Functions traced before tools are applied and while they are, loaded ones, and nested ones.

A little over 400 lines: one subject, with the programs that its tests share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import (
    Edit,
    Everywhere,
    after,
    analysed,
    at_inputs,
    before,
    editing,
    watching,
    watching_backward,
)

from ..comparison import close, equal
from .handwritten_programs import EDITED, W, X, half, layer
from .reference_programs import outside, straight


def edited_layer(x: Any, w: Any) -> Any:
    return tf.tanh(tf.matmul(x, straight(w, half)))


WANTED = outside(edited_layer, X, W)
PLAIN = outside(layer, X, W)


@pytest.mark.parametrize("when", ["before", "while", "before, with gradients"])
def test_function_traced(when: str) -> None:
    function = tf.function(layer)
    if when == "before":
        function(X, W)
    if when == "before, with gradients":
        close(outside(function, X, W), PLAIN)
    with amanda.apply(EDITED):
        close(outside(function, X, W), WANTED)
    close(outside(function, X, W), PLAIN)


@pytest.mark.parametrize("traced", [False, True])
def test_function_with_its_own_tape(traced: bool) -> None:
    function = tf.function(lambda x, w: outside(layer, x, w))
    if traced:
        close(function(X, W), PLAIN)
    with amanda.apply(EDITED):
        close(function(X, W), WANTED)
    close(function(X, W), PLAIN)


@pytest.mark.parametrize("traced", [False, True])
def test_concrete_function_with_a_variable(traced: bool) -> None:
    variable = tf.Variable(W)
    concrete = tf.function(lambda x: layer(x, variable)).get_concrete_function(
        tf.TensorSpec([None, 3], tf.float64)
    )
    if traced:
        concrete(X)
    with amanda.apply(EDITED), tf.GradientTape() as tape:
        y = concrete(X)
    close([y, tape.gradient(y, variable)], [WANTED[0], WANTED[2]])
    equal(variable, W)


class Module(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(W)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float64)])  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        return layer(x, self.w)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float64)])  # type: ignore[untyped-decorator]
    def whole(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = self(x)
        return y, tape.gradient(y, self.w)


@pytest.fixture(name="loaded")
def _loaded(tmp_path: Path) -> Any:
    module = Module()
    tf.saved_model.save(module, str(tmp_path), signatures=module.__call__)
    return tf.saved_model.load(str(tmp_path))


def test_loaded_function_and_its_gradient(loaded: Any) -> None:
    with amanda.apply(EDITED), tf.GradientTape() as tape:
        y = loaded(X)
    close([y, tape.gradient(y, loaded.w)], [WANTED[0], WANTED[2]])
    with amanda.apply(EDITED):
        close(loaded.signatures["serving_default"](x=X)["output_0"], WANTED[0])
    close(loaded(X), PLAIN[0])


def test_edits_of_a_loaded_function_with_gradients_baked_in_are_refused(loaded: Any) -> None:
    with pytest.raises(amanda.AmandaError, match="MatMul"), amanda.apply(EDITED):
        loaded.whole(X)
    seen, watch = watching()
    with amanda.apply(watch):
        close(loaded.whole(X), [PLAIN[0], PLAIN[2]])
    assert "Tanh" in seen
    close(loaded.whole(X), [PLAIN[0], PLAIN[2]])


def test_routines_at_gradients_of_a_loaded_function(loaded: Any) -> None:
    with amanda.apply(at_inputs("MatMul", lambda g: g * 3, 1)), tf.GradientTape() as tape:
        y = loaded(X)
        gradient = tape.gradient(y, loaded.w)
    close(gradient, 3 * PLAIN[2])


def test_other_shapes_and_dtypes_after_a_first_call() -> None:
    function = tf.function(layer)
    for given in ([X, W], [X[:1], W], [tf.cast(X, tf.float32), tf.cast(W, tf.float32)]):
        wanted = outside(edited_layer, *given)
        with amanda.apply(EDITED):
            close(outside(function, *given), wanted)


def test_unknown_shapes_keep_what_is_known_of_them() -> None:
    function = tf.function(
        lambda x, w: tf.reshape(tf.matmul(x, w), [-1]),
        input_signature=[tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec(None, tf.float64)],
    )
    wanted = tf.reshape(tf.matmul(X, half(W)), [-1])
    with amanda.apply(EDITED):
        found = function(X, W)
    close(found, wanted)
    assert found.shape == wanted.shape


# Nested functions.


@pytest.mark.parametrize("tape", ["outside", "in the outer", "in the middle", "in the inner"])
@pytest.mark.parametrize("alone", [False, True], ids=["", "inner called alone before"])
def test_tape_at_any_level_of_nested_functions(tape: str, alone: bool) -> None:
    def wrapped(level: str, program: Callable[..., Any]) -> Any:
        taped = (lambda x, w: outside(program, x, w)) if tape == level else program
        return tf.function(taped)

    inner = wrapped("in the inner", layer)
    if alone:
        inner(X, W)
    middle = wrapped("in the middle", lambda x, w: inner(x, w))
    outer = wrapped("in the outer", lambda x, w: middle(x, w))
    with amanda.apply(EDITED):
        found = outside(outer, X, W) if tape == "outside" else outer(X, W)
    close(found, WANTED)


def test_a_tape_around_a_call_inside_a_function_that_itself_lies_under_a_tape() -> None:
    inner = tf.function(layer)

    def step(program: Callable[..., Any], x: Any, w: Any) -> Any:
        y, dx, dw = outside(program, x, w)
        return tf.reduce_sum(y) + tf.reduce_sum(tf.sin(dx)) + tf.reduce_sum(tf.sin(dw))

    wanted = outside(lambda x, w: step(edited_layer, x, w), X, W)
    with amanda.apply(EDITED):
        close(outside(tf.function(lambda x, w: step(inner, x, w)), X, W), wanted)


def test_one_function_called_from_two_functions_and_alone() -> None:
    inner = tf.function(layer)
    first = tf.function(lambda x, w: inner(x, w) + inner(x, w * 2))
    second = tf.function(lambda x, w: inner(inner(x, w), w))
    wanted = [
        outside(lambda x, w: edited_layer(x, w) + edited_layer(x, w * 2), X, W),
        outside(lambda x, w: edited_layer(edited_layer(x, w), w), X, W),
        WANTED,
    ]
    contexts, watch = analysed()
    with amanda.apply(EDITED, watch):
        found = [outside(program, X, W) for program in (first, second, inner)]
        for each, expected in zip(found, wanted, strict=True):
            close(each, expected)
    # It is one function, so its ops are analysed once.
    assert [c.op_type for c in contexts if c.op_type == "MatMul"] == ["MatMul"]


def test_a_nested_function_that_returns_nothing_that_is_needed() -> None:
    kept = tf.Variable(tf.zeros((), tf.float64))

    @tf.function  # type: ignore[untyped-decorator]
    def note(x: Any) -> None:
        kept.assign_add(tf.reduce_sum(tf.square(x)))

    @tf.function  # type: ignore[untyped-decorator]
    def outer(x: Any) -> Any:
        note(x)
        return x * 2

    with amanda.apply(before("Square", lambda t: t * 3)):
        equal(outer(X), X.numpy() * 2)
    close(kept, tf.reduce_sum(tf.square(X * 3)))


def test_captured_tensors_and_structured_results() -> None:
    offset = tf.constant(2.0, tf.float64)

    @tf.function  # type: ignore[untyped-decorator]
    def program(given: dict[str, Any]) -> dict[str, Any]:
        h = tf.matmul(given["x"], given["w"]) + offset
        return {"h": h, "both": (h * 2, [given["x"]])}

    with amanda.apply(EDITED):
        found = program({"x": X, "w": W})
    wanted = tf.matmul(X, half(W)) + offset
    close([found["h"], found["both"][0], found["both"][1][0]], [wanted, wanted * 2, X])


# What runs, and how often.


def test_every_execution_runs_the_routines_once() -> None:
    seen, watch = watching()
    pairs, watch_backward = watching_backward()
    function = tf.function(layer)
    with amanda.apply(watch, watch_backward):
        outside(function, X, W)
        assert sorted(t for t in seen if t != "Identity") == ["MatMul", "Tanh"]
        outside(function, X, W)
    assert seen.count("MatMul") == 2
    assert seen.count("Tanh") == 2
    # One op may have several backward ops.
    assert pairs.count(("MatMul", "MatMul")) == 4
    assert pairs.count(("TanhGrad", "Tanh")) == 2


def test_a_loop_runs_the_routines_each_time() -> None:
    seen, watch = watching()
    pairs, watch_backward = watching_backward()
    function = tf.function(
        lambda x, w: tf.while_loop(lambda i, _: i < 4, lambda i, x: (i + 1, layer(x, w)), (0, x))[1]
    )
    with amanda.apply(watch, watch_backward):
        outside(function, X, W)
    assert (seen.count("MatMul"), seen.count("Tanh")) == (4, 4)
    assert pairs.count(("MatMul", "MatMul")) == 8
    assert pairs.count(("TanhGrad", "Tanh")) == 4


def test_tools_stack_in_order() -> None:
    function = tf.function(lambda x, w: tf.matmul(x, w))
    plus, times = before("MatMul", lambda t: t + 1, 1), before("MatMul", lambda t: t * 2, 1)
    staged = before("MatMul", amanda.staged(lambda t: t - 3), 1)
    wanted = [
        tf.matmul(X, w).numpy() for w in ((W + 1) * 2, W * 2 + 1, ((W + 1) - 3) * 2, (W - 3) + 1)
    ]
    for tools, expected in zip(
        [(plus, times), (times, plus), (plus, staged, times), (staged, plus)], wanted, strict=True
    ):
        with amanda.apply(*tools):
            close(function(X, W), expected)


def test_both_inputs_and_the_output_at_once() -> None:
    calls: list[int] = []

    def both(a: Any, b: Any) -> Any:
        calls.append(2)
        return a * 2, b + 1

    wanted = tf.matmul(X * 2, W + 1).numpy() * 5
    with amanda.apply(before("MatMul", both), after("MatMul", lambda t: t * 5)):
        close(tf.function(lambda x, w: tf.matmul(x, w))(X, W), wanted)
    assert calls == [2]


def test_list_inputs_are_one_position() -> None:
    calls: list[int] = []

    def first_doubled(tensors: Any) -> Any:
        calls.append(len(tensors))
        return [tensors[0] * 2, tensors[1]]

    function = tf.function(lambda x, w: tf.reduce_sum(tf.concat([x, w], 0) ** 2))
    wanted = [tf.reduce_sum(4 * X * X) + tf.reduce_sum(W * W), 4 * X, 2 * W]
    with amanda.apply(before("ConcatV2", first_doubled, 0)):
        close(outside(function, X, W), wanted)
    with amanda.apply(at_inputs("ConcatV2", first_doubled, 0)):
        close(outside(function, X, W)[1:], [4 * X.numpy(), 2 * W.numpy()])
    assert calls == [2, 2]


def test_list_outputs_are_positions_of_their_own() -> None:
    function = tf.function(
        lambda w: tf.add_n([p * (i + 1.0) for i, p in enumerate(tf.split(w, 3))])
    )
    rows = tf.split(W, 3)
    wanted = (rows[0] + 2 * (rows[1] * 10) + 3 * rows[2]).numpy()
    with amanda.apply(after("Split", lambda t: t * 10, 1)):
        found = outside(function, W)
    close(found, [wanted, tf.constant([[1.0] * 3, [2.0] * 3, [3.0] * 3], tf.float64)])


def test_edits_of_ops_with_attributes_and_other_dtypes() -> None:
    function = tf.function(lambda x: tf.reduce_sum(tf.one_hot(tf.argmax(x, 1), 3) * 2))
    wanted = tf.one_hot((tf.argmax(X, 1) + 1) % 3, 3).numpy()
    seen: list[Any] = []
    with amanda.apply(
        editing(Edit("ArgMax", "after", lambda t: (t + 1) % 3)),
        editing(Edit("OneHot", "after", lambda t: seen.append(t.numpy()))),
    ):
        function(X)
    equal(seen[0], wanted)


DTYPES = [
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
    *(tf.int8, tf.uint16, tf.int64, tf.bool, tf.string, tf.qint8, tf.quint8, tf.qint32),
    *(tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2),
]


def pair_of(dtype: Any, *given: int) -> Any:
    if dtype == tf.string:
        return tf.constant([str(each) for each in given])
    if dtype.is_quantized:
        return tf.bitcast(tf.constant(given, tf.as_dtype(dtype.name[1:])), dtype)
    return tf.cast(tf.constant(given, tf.float32), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("way", ["eager", "function", "session"])
def test_values_of_every_dtype_reach_routines_and_come_back(way: str, dtype: Any) -> None:
    one, other = pair_of(dtype, 1, 0), pair_of(dtype, 0, 1)
    reached: list[Any] = []

    def swapped(value: Any) -> Any:
        reached.append((value.dtype, value.numpy().tolist()))
        return other

    def program(x: Any) -> Any:
        return tf.raw_ops.Identity(input=x, name="same")

    with amanda.apply(before("Identity", swapped), after("Identity", lambda value: value)):
        if way == "session":
            graph = tf.Graph()
            with graph.as_default():
                x = tf.compat.v1.placeholder(dtype, [2])
                y = program(x)
            with tf.compat.v1.Session(graph=graph) as session:
                found = session.run(y, {x: one.numpy()})
        else:
            found = (tf.function(program) if way == "function" else program)(one).numpy()
    assert reached[0] == (dtype, one.numpy().tolist())
    assert found.dtype == one.numpy().dtype
    assert found.tolist() == other.numpy().tolist()


@pytest.mark.parametrize("aligned", [False, True])
def test_a_loop_over_a_table_is_watched_in_a_loaded_model(tmp_path: Path, aligned: bool) -> None:
    """The gradient's loop reads the variable's shape by a handle, for which there is no tensor
    list.
    """

    class Model(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.table = tf.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            def body(i: Any, x: Any) -> Any:
                return i + 1, tf.tanh(x * tf.gather(self.table, [0, 2]))

            return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]

    tf.saved_model.save(Model(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    x = tf.constant([[0.1, 0.2], [0.3, 0.4]])

    def run() -> list[Any]:
        with tf.GradientTape() as tape:
            y = loaded(x)
        return [y, tf.convert_to_tensor(tape.gradient(y, loaded.table))]

    plain = run()
    with amanda.apply(Everywhere(lambda *values: None, aligned)):
        equal(run(), plain)
