"""Remnants in TensorFlow and in memory, while tools are applied and after they are removed."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import script_ops

import amanda
from amanda_core.testing.kit.tools import after, at_inputs, before, replacing, watching
from amanda_driver_tf.graphs.function_graphs import GRAPHS

from ..comparison import close
from .handwritten_programs import W, X, layer
from .patches import fingerprint

#: What is written under tools has none of their changes, and they say so.
pytestmark = pytest.mark.filterwarnings("ignore:.*without the changes of:amanda.AmandaWarning")


def run(function: Any) -> None:
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        y = function(X, W)
    tape.gradient(y, [X, W])


def known() -> set[str]:
    """Return the names of the functions in the runtime."""
    return set(context.context().list_function_names())


#: What programs of earlier tests left: TensorFlow 2.16 never forgets a `custom_gradient`'s graph.
_LEFT: set[str] = set()


def ours() -> list[str]:
    return sorted(name for name in known() - _LEFT if name.startswith("amanda"))


@pytest.fixture(autouse=True)
def _clean() -> None:
    gc.collect()
    _LEFT.clear()
    _LEFT.update(known())


def routines(number: int) -> list[amanda.Tool]:
    return [
        before("MatMul", lambda t: t * number, 1),
        after("Tanh", amanda.staged(lambda t: t + number)),
        at_inputs("MatMul", lambda g: g * number, 1),
    ]


def test_functions_and_graphs_stay_as_they_are() -> None:
    function = tf.function(layer)
    concrete = function.get_concrete_function(X, W)
    run(function)

    def state() -> tuple[bytes, ...]:
        name = concrete.function_def.signature.name
        protos = (
            concrete.graph.as_graph_def(),
            concrete.function_def,
            context.context().get_function_def(name),
        )
        return tuple(proto.SerializeToString(deterministic=True) for proto in protos)

    found, operations = state(), [op.name for op in concrete.graph.get_operations()]
    with amanda.apply(*routines(2)):
        run(function)
        assert state() == found
        assert [op.name for op in concrete.graph.get_operations()] == operations
        assert concrete.structured_outputs.shape == (2, 3)
    assert state() == found


def test_what_is_traced_under_tools_is_the_program_itself() -> None:
    function = tf.function(layer)
    with amanda.apply(*routines(2)):
        run(function)
        inside = function.get_concrete_function(X, W).graph.as_graph_def()
    outside = tf.function(layer).get_concrete_function(X, W).graph.as_graph_def()
    assert [(n.name, n.op) for n in inside.node] == [(n.name, n.op) for n in outside.node]
    assert b"manda" not in inside.SerializeToString()


def test_files_written_under_tools_know_nothing_of_them(tmp_path: Path) -> None:
    class Module(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(W)

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float64)])  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return layer(x, self.w)

    module = Module()
    with amanda.apply(*routines(2)):
        module(X)
        tf.saved_model.save(module, str(tmp_path / "model"))
        tf.train.Checkpoint(module=module).save(str(tmp_path / "checkpoint"))
    for file in tmp_path.rglob("*"):
        if file.is_file():
            content = file.read_bytes().lower()
            assert b"amanda" not in content
            assert b"eagerpyfunc" not in content
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    close(loaded(X), layer(X, W))


def test_everything_is_put_back() -> None:
    function = tf.function(layer)
    with amanda.apply(*routines(2)):  # The recorder, which stays, and what is imported late.
        run(function)
    found = fingerprint()
    with amanda.apply(*routines(2)):
        run(function)
        with amanda.apply(*routines(3)):
            run(function)
        assert fingerprint() != found
    assert fingerprint() == found
    with pytest.raises(ZeroDivisionError), amanda.apply(before("MatMul", lambda *v: 1 / 0)):
        run(function)
    assert fingerprint() == found


WITH_AND_WITHOUT = """
import re
import tensorflow as tf

v1 = tf.compat.v1


@tf.custom_gradient
def clipped(x):
    return tf.identity(x), lambda g: tf.clip_by_value(g, -1.0, 1.0)


def layer(x, w):
    y = tf.tanh(tf.matmul(x, w)) + clipped(x)
    y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y) * 2.0), (0, y))[1]
    y = tf.cond(tf.reduce_sum(y) > 0, lambda: tf.exp(y), lambda: tf.square(y))
    return tf.nn.silu(tf.gather(y, [0, 1]))


def parts(graph):
    # Functions and gradients are numbered through the process.
    shown = graph.as_graph_def()
    found = [*shown.node, *shown.library.function]
    return sorted(re.sub(r"[_-]\\d+", "", str(part)) for part in found)


def built():
    found = []
    for new in (True, False):
        (v1.enable_control_flow_v2 if new else v1.disable_control_flow_v2)()
        with tf.Graph().as_default() as graph:
            x, w = v1.placeholder(tf.float32, [2, 3]), v1.get_variable("w", [3, 3])
            tf.gradients(tf.reduce_sum(layer(x, w)), [w])
            found.append(parts(graph))
    v1.enable_control_flow_v2()
    w = tf.ones((3, 3))

    @tf.function
    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(w)
            with tf.GradientTape() as tape:
                tape.watch(w)
                y = tf.nn.silu(clipped(tf.matmul(x, w)))
            gradient = tape.gradient(y, w)
        return y, outer.gradient(gradient, w)

    found.append(parts(step.get_concrete_function(tf.ones((2, 3))).graph))
    return found


before = built()
import amanda
with amanda.apply(amanda.Tool()):
    pass
from amanda_driver_tf.graphs import recorder
assert recorder.is_installed()
assert built() == before, "what is built afterwards differs"
assert sum(map(len, before)) > 300
"""


@pytest.mark.slow
def test_the_recorder_is_inert_once_tools_are_left(tmp_path: Path) -> None:
    """TensorFlow builds the same graph as in a process without Amanda."""
    program = tmp_path / "program.py"
    program.write_text(WITH_AND_WITHOUT)
    ran = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_records_die_with_their_graphs() -> None:
    def once() -> None:
        run(tf.function(layer))

    once()
    gc.collect()
    known_graphs, objects = len(GRAPHS), len(gc.get_objects())
    for _ in range(5):
        once()
    gc.collect()
    assert len(GRAPHS) <= known_graphs
    assert len(gc.get_objects()) - objects < 100
    assert ours() == []


@pytest.mark.slow
def test_memory_stays_flat_over_new_tools() -> None:
    function = tf.function(layer)

    def rounds(count: int) -> None:
        for number in range(count):
            with amanda.apply(*routines(number)):
                run(function)

    rounds(6)
    gc.collect()
    objects, names, hosts = len(gc.get_objects()), len(known()), script_ops._py_funcs.size()
    rounds(30)
    gc.collect()
    assert len(known()) <= names
    assert script_ops._py_funcs.size() <= hosts
    assert len(gc.get_objects()) - objects < 30 * 10


@pytest.mark.slow
def test_memory_stays_flat_over_executions() -> None:
    function = tf.function(layer)
    with amanda.apply(*routines(2)):
        for _ in range(10):
            run(function)
        gc.collect()
        objects, names = len(gc.get_objects()), len(known())
        for _ in range(100):
            run(function)
        gc.collect()
        assert len(known()) == names
        assert len(gc.get_objects()) - objects < 100


@pytest.mark.slow
def test_memory_stays_flat_without_the_cache_and_with_schedules() -> None:
    function = tf.function(layer)
    tools = routines(2)

    def rounds(count: int) -> None:
        with amanda.apply(*tools):
            for _ in range(count):
                tools[0].invalidate()
                run(function)
                with amanda.cache_disabled():
                    run(function)

    rounds(8)
    gc.collect()
    objects, names = len(gc.get_objects()), len(known())
    rounds(20)
    gc.collect()
    assert len(known()) <= names
    assert len(gc.get_objects()) - objects < 20 * 10


def test_twins_go_with_their_function() -> None:
    tools = routines(2)

    def once() -> None:
        function = tf.function(layer)
        with amanda.apply(*tools):
            run(function)
            function(X, W)

    once()
    gc.collect()
    names = known()
    for _ in range(5):
        once()
    gc.collect()
    assert not {name for name in known() - names if name.startswith("amanda")}


def test_twins_go_with_their_tool() -> None:
    function = tf.function(layer)
    run(function)
    tools = routines(2)
    reference = weakref.ref(tools[0])
    with amanda.apply(*tools):
        run(function)
        assert ours()
    del tools
    gc.collect()
    assert reference() is None
    assert ours() == []


def test_a_refused_function_leaves_nothing() -> None:
    def derivative(x: Any, w: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = inner(x, w)
            gradient = tape.gradient(y, x)
        return outer.gradient(gradient, x)

    inner, second = tf.function(layer), tf.function(derivative)
    known_before, hosts = ours(), script_ops._py_funcs.size()
    doubled = replacing("Tanh", lambda value: value * value)
    with (
        pytest.raises(amanda.AmandaError, match="differentiated once more"),
        amanda.apply(doubled),
    ):
        second(X, W)
    gc.collect()
    assert ours() == known_before
    assert script_ops._py_funcs.size() == hosts


def test_tools_keep_no_model_alive() -> None:
    module = tf.Module()
    module.w = tf.Variable(W)
    function = tf.function(lambda x, w, module=module: layer(x, module.w) + w[:1])
    tools = routines(2)
    with amanda.apply(*tools):
        run(function)
    references = [weakref.ref(module), weakref.ref(module.w)]
    del module, function
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert tools


def test_values_that_routines_saw_are_not_kept() -> None:
    seen: list[Any] = []
    function = tf.function(layer)
    with amanda.apply(before("Tanh", lambda t: seen.append(weakref.ref(t)))):
        run(function)
        run(function)
        gc.collect()
        assert [reference() for reference in seen] == [None, None]


def test_functions_of_data_pipelines_are_left_alone() -> None:
    seen, watch = watching()
    with amanda.apply(watch, before("Mul", lambda a, b: (a * 100, b))) as handle:
        dataset = tf.data.Dataset.range(4).map(lambda i: tf.cast(i, tf.float32) * 2.0).batch(2)
        found = [batch.numpy().tolist() for batch in dataset]
        coverage = handle.coverage()["tensorflow"]
    assert found == [[0.0, 2.0], [4.0, 6.0]]
    assert "Mul" not in seen
    assert any("tf.data" in gap.what for gap in coverage)
