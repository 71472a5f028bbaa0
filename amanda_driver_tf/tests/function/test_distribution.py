"""Distribution strategies, in processes of their own, for devices are fixed once used."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import amanda

#: What is written under tools has none of their changes, and they say so.
pytestmark = pytest.mark.filterwarnings("ignore:.*without the changes of:amanda.AmandaWarning")

HEAD = """
    import os
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import warnings
    import numpy as np
    import tensorflow as tf
    import keras
    import amanda

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
    )

    def half(value):
        return value * 0.5 + 0.1

    def editing():
        tool = amanda.Tool()
        tool.add_inst_for_op(
            lambda c: c.insert_before_op(half, inputs=[1]) if c.op_type == "MatMul" else None
        )
        return tool

    @tf.custom_gradient
    def straight(value):
        return half(value), lambda gradient: gradient

    W = np.random.default_rng(0).normal(size=(3, 2)).astype("float32")
    X = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")
    Y = np.random.default_rng(2).normal(size=(8, 2)).astype("float32")
"""


def run(tmp_path: Path, program: str) -> str:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(program))
    ran = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.slow
def test_training_step_on_two_replicas(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        def train(edit, tools):
            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            assert strategy.num_replicas_in_sync == 2
            with strategy.scope():
                w = tf.Variable(W)
            data = strategy.experimental_distribute_dataset(
                tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
            )

            def step(batch):
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((tf.tanh(tf.matmul(x, edit(w))) - y) ** 2)
                gradient = tape.gradient(loss, w)
                context = tf.distribute.get_replica_context()
                w.assign_sub(0.1 * context.all_reduce("mean", gradient))
                return loss

            @tf.function
            def whole(batch):
                return strategy.reduce("mean", strategy.run(step, args=(batch,)), axis=None)

            losses = []
            with amanda.apply(*tools):
                for _ in range(3):
                    for batch in data:
                        losses.append(float(whole(batch)))
            return losses, w.values[0].numpy(), w.values[1].numpy()

        wanted = train(lambda w: straight(tf.convert_to_tensor(w)), [])
        calls, ids = [], set()
        counting = amanda.Tool()

        def analyse(context):
            if context.op_type == "MatMul":
                ids.add(context.get_op_id())
                context.insert_before_op(lambda *values: calls.append(1))

        counting.add_inst_for_op(analyse)
        found = train(lambda w: w, [editing(), counting])
        assert len(calls) == 3 * 2  # Once a step and replica.
        assert len(ids) == 2
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        np.testing.assert_array_equal(found[1], found[2])
        """,
    )


@pytest.mark.slow
def test_fit_on_two_replicas(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        class Edited(keras.layers.Dense):
            def call(self, x):
                return tf.matmul(x, straight(tf.convert_to_tensor(self.kernel))) + self.bias

        def train(layer, tools):
            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            with strategy.scope():
                keras.utils.set_random_seed(0)
                model = keras.Sequential([layer(2)])
                model.build((None, 3))
                model.compile(keras.optimizers.SGD(0.1), "mse")
            with amanda.apply(*tools):
                history = model.fit(X, Y, epochs=2, batch_size=4, shuffle=False, verbose=0)
                predicted = model.predict(X, verbose=0)
            return history.history["loss"], predicted, model.get_weights()[0]

        for a, b in zip(train(keras.layers.Dense, [editing()]), train(Edited, []), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        """,
    )


STRATEGIES = """
    tf.get_logger().setLevel("ERROR")  # It warns of replicas that run eagerly.
    both = ["CPU:0", "CPU:1"]
    one = lambda: tf.distribute.OneDeviceStrategy("CPU:1")
    mirrored = lambda: tf.distribute.MirroredStrategy(both)
    central = lambda: tf.distribute.experimental.CentralStorageStrategy(both)
    several = lambda: tf.distribute.MultiWorkerMirroredStrategy()
"""


@pytest.mark.slow
def test_every_strategy_runs_edited_functions(tmp_path: Path) -> None:
    run(
        tmp_path,
        STRATEGIES
        + """
    def train(strategy, edit, tools):
        with strategy.scope():
            w = tf.Variable(W, aggregation=tf.VariableAggregation.MEAN)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.tanh(tf.matmul(x, edit(w))) - y) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        @tf.function
        def whole(x, y):
            return strategy.reduce("mean", strategy.run(step, args=(x, y)), axis=None)

        with amanda.apply(*tools):
            losses = [float(whole(tf.constant(X), tf.constant(Y))) for _ in range(2)]
        return losses, w.numpy()

    plain = train(tf.distribute.get_strategy(), lambda w: w, [])
    for make in (tf.distribute.get_strategy, one, central, several):
        strategy = make()
        wanted = train(strategy, lambda w: straight(tf.convert_to_tensor(w)), [])
        found = train(strategy, lambda w: w, [editing()])
        for a, b, c in zip(found, wanted, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=str(strategy))
            assert not np.allclose(a, c)
    """,
    )


@pytest.mark.slow
def test_replicas_that_run_eagerly(tmp_path: Path) -> None:
    """Each runs in its own thread; the thread that called them does what they do together."""
    run(
        tmp_path,
        STRATEGIES
        + """
    class Edited(keras.layers.Dense):
        def call(self, x):
            return tf.matmul(x, straight(tf.convert_to_tensor(self.kernel))) + self.bias

    def train(strategy, layer, tools):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((3,)), layer(2, name="dense")], name="net")
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        with amanda.apply(*tools):
            losses = model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        return losses.history["loss"], model.get_weights()[0]

    class Own(Exception):
        def __init__(self, one, two):
            super().__init__(one, two)

    def fail(value):
        raise Own(1, 2)

    calls, ids, zones, steps = [], set(), {}, []
    watching = amanda.Tool()

    def analyse(context):
        zones.setdefault(context.zone, set()).add(context.op_type)
        if context.op_type == "MatMul":
            assert context.name.endswith("/dense/MatMul")
            ids.add(context.get_op_id())
            context.insert_before_op(lambda *values: calls.append(1))

    watching.add_inst_for_op(analyse)
    watching.add_inst_for_step(end=steps.append)
    wanted = train(mirrored(), Edited, [])
    found = train(mirrored(), keras.layers.Dense, [editing(), watching])
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert len(calls) == 2 * 2  # Of two batches, by two replicas.
    assert steps == [0, 1]
    assert len(ids) == 1  # It is one layer.
    assert any("AssignSub" in op_type for op_type in zones["optimizer"])
    assert not any("AssignSub" in op_type for op_type in zones["model"])

    for make in (mirrored, central):
        strategy = make()

        def program():
            with amanda.disabled():
                off = tf.reduce_sum(tf.matmul(X, W))
            return off, tf.reduce_sum(tf.matmul(X, W))

        with amanda.apply(editing()):
            for off, on in zip(*map(strategy.experimental_local_results, strategy.run(program))):
                np.testing.assert_allclose(off, (X @ W).sum(), rtol=1e-5)
                np.testing.assert_allclose(on, (X @ half(W)).sum(), rtol=1e-5)
        def applying():
            with amanda.apply(editing()):
                pass

        try:
            with amanda.apply(editing()):
                strategy.run(applying)
        except amanda.AmandaError as error:
            assert "inside a replica" in str(error)
        else:
            raise AssertionError("not refused")
        failing = amanda.Tool()
        failing.add_inst_for_op(
            lambda c: c.insert_before_op(fail, inputs=[1]) if c.op_type == "MatMul" else None
        )
        try:
            with amanda.apply(failing):
                strategy.run(program)
        except Own as error:
            assert "routine fail, op 'MatMul'" in error.__notes__[0], error.__notes__
        else:
            raise AssertionError("the routine's error was lost")
        off, on = strategy.run(program)
        for value in strategy.experimental_local_results(on):
            np.testing.assert_allclose(value, (X @ W).sum(), rtol=1e-5)
    """,
    )


def test_functions_sent_to_workers_are_refused() -> None:
    class Coordinator(tf.distribute.coordinator.ClusterCoordinator):  # type: ignore[misc]
        """Has no cluster, since nothing that is refused reaches one."""

        def __new__(cls) -> Any:
            return object.__new__(cls)

        def __init__(self) -> None:
            pass

        def __del__(self) -> None:
            pass

    coordinator: Any = Coordinator()
    step = tf.function(lambda: tf.constant(1.0))
    with amanda.apply(amanda.Tool()):
        with pytest.raises(amanda.AmandaError, match="sends the function"):
            coordinator.schedule(step)
        with amanda.disabled(), pytest.raises(AttributeError):
            coordinator.schedule(step)
    with pytest.raises(AttributeError):
        coordinator.schedule(step)


@pytest.mark.slow
def test_tensors_spread_over_devices(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
    from tensorflow.experimental import dtensor

    mesh = dtensor.create_mesh([("x", 2)], devices=["CPU:0", "CPU:1"])
    rows = dtensor.Layout(["x", dtensor.UNSHARDED], mesh)
    whole = dtensor.Layout.replicated(mesh, rank=2)
    x = dtensor.relayout(dtensor.copy_to_mesh(tf.constant(X), whole), rows)
    w = dtensor.DVariable(dtensor.copy_to_mesh(tf.constant(W), whole))

    def layer(x):
        return tf.tanh(tf.matmul(x, w))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = layer(x)
        return y, tape.gradient(y, w)

    def tool(routine):
        made = amanda.Tool()
        made.add_inst_for_op(
            lambda c: c.insert_before_op(routine, inputs=[1]) if c.op_type == "MatMul" else None
        )
        return made

    def check(found, kernel):
        assert dtensor.fetch_layout(found) == rows
        parts = [part.numpy() for part in dtensor.unpack(found)]
        np.testing.assert_allclose(np.concatenate(parts), np.tanh(X @ kernel), rtol=1e-4)

    for kernel, tools in ((W, []), (half(W), [tool(amanda.staged(lambda v: half(v)))])):
        with amanda.apply(*tools):
            y, gradient = step(x)
            check(y, kernel)
        wanted = X.T @ (1 - np.tanh(X @ kernel) ** 2)
        np.testing.assert_allclose(dtensor.unpack(gradient)[0], wanted, rtol=1e-4)
    def refused():
        try:
            step(x)
        except amanda.AmandaError as error:
            assert "DTensor" in str(error) and "@amanda.staged" in str(error)
        else:
            raise AssertionError("not refused")

    with amanda.apply(tool(half)):
        check(layer(x), half(W))
        refused()
    from amanda_core.driver_kit.marks import Marks

    marks, marking = Marks(lambda: None), amanda.Tool()
    marking.add_inst_for_op(lambda c: c.insert_before_op(marks.note, observe=True, number=0))
    with amanda.apply(marking):
        refused()
    check(step(x)[0], W)
    """,
    )


@pytest.mark.slow
def test_replicas_have_one_decision_for_one_weight(tmp_path: Path) -> None:
    """Decisions by weights alone are those of one device; others are refused, or noted."""
    run(
        tmp_path,
        """
        from amanda_tools.flops import Flops
        from amanda_tools.prune import Prune
        from amanda_tools.quantize import Quantize

        def train(strategy, tool):
            with strategy.scope():
                w = tf.Variable(W, name="w")

            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum((tf.matmul(x, w) - y) ** 2)
                gradient = tape.gradient(loss, w)
                context = tf.distribute.get_replica_context()
                w.assign_sub(0.01 * context.all_reduce("sum", gradient))
                return loss

            @tf.function
            def whole(batch):
                return strategy.reduce("sum", strategy.run(step, args=batch), axis=None)

            data = strategy.experimental_distribute_dataset(
                tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
            )
            with amanda.apply(tool):
                losses = [float(whole(batch)) for _ in range(3) for batch in data]
            return losses, w.numpy()

        one = lambda: tf.distribute.OneDeviceStrategy("CPU:0")
        mirrored = lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

        def compared(make):
            alone, both = make(), make()
            wanted, found = train(one(), alone), train(mirrored(), both)
            np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
            np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
            return alone, both

        for scope in ("weight", "global"):
            alone, both = compared(lambda: Prune(0.5, scope=scope))
            assert list(both.masks.saved()) == list(alone.masks.saved()) == ["w"]
            kept = both.masks.saved()["w"]
            np.testing.assert_array_equal(kept, alone.masks.saved()["w"])
            assert np.sum(kept != 0) == 3
        alone, both = compared(lambda: Quantize(activations="none"))
        for name, scale in alone.grids.saved().items():
            np.testing.assert_allclose(both.grids.saved()[name], scale)
        alone, both = compared(Flops)
        assert both.result().macs == alone.result().macs == 3 * 8 * 3 * 2
        ranges = Quantize(weights="none")
        train(mirrored(), ranges)
        assert any("one of 2" in note for note in ranges.result().notes), ranges.result().notes
        try:
            train(mirrored(), Prune(0.5, score="taylor"))
        except amanda.AmandaError as error:
            assert "in each replica" in str(error)
        else:
            raise AssertionError("not refused")
        """,
    )
