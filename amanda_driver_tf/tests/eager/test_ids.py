"""Op ids: the same in every iteration and process, under branches and loops, and bounded."""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators
# TensorFlow and Keras have no types.

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext, apply
from amanda_core.testing.kit.tools import idle, tool
from amanda_driver_tf.threads import STATE

from .tensors import normal, variable


class Ids:
    """The ids of ops in order of execution, and the tool that writes them down."""

    def __init__(self, op_type: str | None = None) -> None:
        self.seen: list[int] = []
        self.names: dict[int, str] = {}

        def analyse(context: OpContext) -> None:
            number = context.get_op_id()
            self.names[number] = context.name
            context.insert_before_op(lambda *values: self.seen.append(number))

        self.tool = tool(analyse, op_type)

    def take(self) -> list[int]:
        seen, self.seen = self.seen, []
        return seen


def model() -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            keras.layers.Conv2D(3, 3, name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.ReLU(name="act"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(2, name="head"),
        ],
        name="net",
    )


def train(net: Any, x: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(net(x, training=True))
    tape.gradient(loss, [v.value for v in net.trainable_variables])


def test_ids_are_the_same_in_every_iteration_and_distinct() -> None:
    net, x, ids = model(), normal(2, 8, 8, 2), Ids()
    with apply(ids.tool):
        train(net, x)
        first = ids.take()
        assert len(set(first)) == len(first)
        for _ in range(3):
            train(net, normal(3, 8, 8, 2))
            assert ids.take() == first


def test_ids_do_not_depend_on_what_else_is_applied_or_wanted() -> None:
    net, x = model(), normal(2, 8, 8, 2)
    found = []
    for others in ((), (idle(),)):
        ids = Ids()
        with apply(*others, ids.tool):
            for _ in range(2):
                net(x)
        found.append(ids.take())
    assert found[0] == found[1]


def test_ids_of_ops_reached_by_the_fast_path_and_by_the_fallback_are_the_same() -> None:
    # Lists of tensors are packed while the arguments of another op are converted.
    a, v = normal(2), variable(2, 2)
    analysed: list[str] = []
    made = tool(lambda context: analysed.append(context.op_type))
    with apply(made):
        for _ in range(3):
            tf.add([a, a], v)
    assert analysed == ["Pack", "ReadVariableOp", "AddV2"]


def test_names_read_like_the_model() -> None:
    net, ids = model(), Ids()
    with apply(ids.tool):
        net(normal(1, 8, 8, 2))
    names = set(ids.names.values())
    assert {"net/first/Conv2D", "net/act/Relu", "net/head/MatMul"} <= names
    assert all(name.startswith("net/") for name in names)


_PROGRAM = """
import json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf
from amanda import Tool, apply

net = keras.Sequential([keras.Input((8, 8, 2)), keras.layers.Conv2D(3, 3), keras.layers.ReLU(),
                        keras.layers.Flatten(), keras.layers.Dense(2)], name="net")
weights = [tf.Variable(np.ones((2, 2), np.float32)) for _ in range(3)]
seen, made = [], Tool()
made.add_inst_for_op(lambda c: seen.append(c.get_op_id()))
made.add_inst_for_op(lambda c: seen.append(c.get_backward_op_id()), True)
with apply(made), tf.GradientTape() as tape:
    y = net(np.ones((2, 8, 8, 2), np.float32))
    for w in weights:
        y = tf.tanh(tf.matmul(y, w))
    tape.gradient(y, [*weights, *[v.value for v in net.trainable_variables]])
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_ids_are_the_same_in_another_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(program)], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0]) > 30


@pytest.mark.parametrize("first", [True, False])
def test_skipping_an_op_does_not_shift_the_next_ones_id(first: bool) -> None:
    class Branching(keras.layers.Layer):
        def call(self, x: Any, both: bool = True) -> Any:
            if both:
                x = tf.nn.relu(x)
            return tf.nn.relu(x)

    layer, ids = Branching(name="branch"), Ids("Relu")
    with apply(ids.tool):
        layer(normal(2), both=first)
        one = ids.take()
        layer(normal(2), both=not first)
        two = ids.take()
    both, alone = (one, two) if first else (two, one)
    assert len(both) == 2
    assert alone == both[1:]


@pytest.mark.parametrize("first", [True, False])
def test_skipping_outside_any_layer(first: bool) -> None:
    def program(both: bool) -> None:
        x = normal(2)
        if both:
            x = tf.nn.relu(x)
        tf.nn.relu(x)

    ids = Ids("Relu")
    with apply(ids.tool):
        program(first)
        one = ids.take()
        program(not first)
        two = ids.take()
    both, alone = (one, two) if first else (two, one)
    assert len(set(both)) == 2
    assert alone == both[1:]


def test_functions_told_apart_although_called_at_one_line() -> None:
    def program(activations: Any, x: Any) -> Any:
        for activation in activations:
            x = activation(x)
        return x

    one, two = (lambda x: tf.nn.relu(x)), (lambda x: tf.nn.relu(x + 0.0))
    ids = Ids("Relu")
    with apply(ids.tool):
        program([one, two], normal(2))
        both = ids.take()
        program([two], normal(2))
        alone = ids.take()
    assert len(set(both)) == 2
    assert alone == both[1:]


def test_slices_of_one_line_are_told_apart() -> None:
    x, ids = normal(3, 2), Ids("StridedSlice")
    with apply(ids.tool):
        for _ in range(3):
            y = x[0] + x[1]
            assert y.shape == (2,)
    seen = ids.take()
    assert len(set(seen)) == 2
    assert seen[:2] == seen[2:4] == seen[4:]


def test_ids_stay_when_the_interpreter_specialises() -> None:
    weight, ids = variable(3, 3), Ids()
    with apply(ids.tool):
        runs = []
        for _ in range(30):
            with tf.GradientTape() as tape:
                value = weight[0] * weight[1] + sum(weight[:, 2] for _ in range(2))
            tape.gradient(value, weight)
            runs.append(ids.take())
    assert [run for run in runs if run != runs[0]] == []
    assert len(set(runs[0])) == len([*ids.names])


def test_a_sum_that_grows_is_one_op() -> None:
    total, ids = tf.constant(0.0), Ids("AddV2")
    with apply(ids.tool):
        for index in range(50):
            total += float(index)
    assert len(set(ids.take())) == 1


@pytest.mark.parametrize("kind", ["variables", "watched"])
def test_each_layer_of_a_loop_over_weights_has_its_own_id(kind: str) -> None:
    weights: list[Any] = [variable(2, 2, seed=s) for s in range(4)]
    if kind == "watched":
        weights = [w.value() for w in weights]
    ids = Ids("MatMul")

    def program(chosen: Any) -> None:
        with tf.GradientTape() as tape:
            if kind == "watched":
                tape.watch(chosen)
            y = normal(1, 2)
            for w in chosen:
                y = tf.matmul(y, w)
        tape.gradient(y, chosen)

    with apply(ids.tool):
        for _ in range(3):
            program(weights)
        seen = ids.take()
        assert len(set(seen)) == 4
        assert seen[:4] == seen[4:8] == seen[8:]
        program([weights[0], weights[2]])
        assert ids.take() == [seen[0], seen[2]]


def test_weights_made_anew_in_each_step_do_not_make_new_ops() -> None:
    ids = Ids("MatMul")
    with apply(ids.tool):
        for step in range(20):
            w = variable(2, 2, seed=step)
            tf.matmul(normal(1, 2), w)
            del w
    assert len(set(ids.take())) == 1


def test_a_layer_used_twice_is_one_op_executed_twice() -> None:
    layer = keras.layers.Dense(2, name="shared")
    inputs = keras.Input((2,))
    net = keras.Model(inputs, layer(layer(inputs)), name="twice")
    ids = Ids("MatMul")
    with apply(ids.tool):
        net(normal(1, 2))
    seen = ids.take()
    assert len(seen) == 2
    assert len(set(seen)) == 1


def test_two_models_of_one_name_do_not_collide() -> None:
    ids = Ids("Conv2D")
    one, two = model(), model()
    with apply(ids.tool):
        for net in (one, two, one, two):
            net(normal(1, 8, 8, 2))
    seen = ids.take()
    assert len(set(seen)) == 2
    assert seen[:2] == seen[2:]
    assert sorted(ids.names.values()) == ["net#2/first/Conv2D", "net/first/Conv2D"]


def test_library_layer_that_calls_one_op_type_twice() -> None:
    layer = keras.layers.MultiHeadAttention(2, 4, name="attention")
    x, ids = normal(1, 3, 4), Ids("BatchMatMulV2")
    other = Ids("Einsum")
    with apply(ids.tool, other.tool):
        layer(x, x)
        layer(x, x)
    for found in (ids.take(), other.take()):
        half = len(found) // 2
        assert found[:half] == found[half:]
        assert len(set(found)) == half


@pytest.mark.slow
def test_ids_are_bounded_over_many_steps() -> None:
    w, x, ids = variable(2, 2), normal(1, 2), Ids()
    with apply(ids.tool, idle()):
        sizes = []
        total = tf.constant(0.0)
        for step in range(1001):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(tf.matmul(x, w)) * 0.5)
            w.assign_sub(tape.gradient(loss, w) * 0.01)
            total += loss
            if step in (10, 1000):
                place: Any = STATE.eager
                sizes.append(
                    (len(list(place.program.session.contexts())), len(place.program.sites))
                )
    assert sizes[0] == sizes[1]
    assert len(set(ids.take())) < 30


@pytest.mark.slow
def test_layers_made_anew_leave_nothing_behind() -> None:
    x = normal(1, 2)
    with apply(idle()):
        sizes = []
        for step in range(15):
            layer = keras.layers.Dense(2)
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(layer(x))
            tape.gradient(y, [v.value for v in layer.trainable_variables])
            del layer, tape, y
            if step in (5, 14):
                gc.collect()
                place: Any = STATE.eager
                keras.layers.Dense(1, name="sweep")(x)
                sizes.append(
                    (len(list(place.program.session.contexts())), len(place.program.sites))
                )
    assert sizes[1][0] <= sizes[0][0] + 2
    assert sizes[1][1] <= sizes[0][1] + 2


@pytest.mark.slow
def test_models_made_anew_around_a_shared_layer_leave_nothing_behind() -> None:
    x, shared = normal(1, 2), keras.layers.Dense(2, name="shared")
    shared(x)
    sizes = []
    with apply(idle()):
        for step in range(12):
            net = keras.Sequential([keras.Input((2,)), shared, keras.layers.ReLU()])
            net(x)
            del net
            if step in (4, 11):
                gc.collect()
                place: Any = STATE.eager
                shared(x)
                sizes.append(
                    (len(list(place.program.session.contexts())), len(place.program.sites))
                )
    assert sizes[1] == sizes[0]


def test_no_tensor_is_kept_between_iterations() -> None:
    import weakref

    net = model()
    with apply(idle(), Ids().tool):
        for _ in range(2):
            x = normal(2, 8, 8, 2)
            with tf.GradientTape() as tape:
                y = net(x, training=True)
                loss = tf.reduce_sum(y)
            tape.gradient(loss, [v.value for v in net.trainable_variables])
            dead = [weakref.ref(value) for value in (x, y, loss)]
            del x, y, loss, tape
            gc.collect()
            assert [reference() for reference in dead] == [None] * 3


def test_zones() -> None:
    found: dict[str, set[str]] = {}
    made = tool(lambda c: found.setdefault(c.zone, set()).add(c.op_type))
    with apply(made):
        net = keras.Sequential([keras.layers.Dense(2)])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(normal(3, 4)))
        grads = tape.gradient(loss, [v.value for v in net.trainable_variables])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
    assert "MatMul" in found["model"]
    assert any("Random" in op for op in found["init"])
    assert any("Assign" in op for op in found["optimizer"])
    assert not any("Random" in op for op in found["model"])


def test_marked_zones_cover_layers_and_have_ids_of_their_own() -> None:
    found: dict[str, set[str]] = {}
    ids: dict[str, set[str]] = {}

    def look(context: OpContext) -> None:
        found.setdefault(context.zone, set()).add(context.op_type)
        ids.setdefault(context.zone, set()).add(context.op_id)

    net = keras.Sequential([keras.layers.Dense(2, activation="relu")])
    net(normal(3, 4))
    metric = keras.metrics.MeanSquaredError()
    with apply(tool(look)):
        for _ in range(2):
            net(normal(3, 4))
            with amanda.zone("teacher"):
                tf.exp(net(normal(3, 4)))
            metric.update_state(normal(3, 4), normal(3, 4))
    assert {"MatMul", "Relu"} <= found["model"]
    assert {"MatMul", "Relu", "Exp"} <= found["teacher"]
    assert "Exp" not in found["model"]
    assert not ids["model"] & ids["teacher"]
    assert "metrics" in found
