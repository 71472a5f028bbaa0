"""Distribution strategies; each in a process of its own, for devices are fixed once used."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

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
        [sys.executable, "-P", str(file)], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


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


def test_other_strategies_are_refused_or_right(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        wanted = np.tanh(X @ half(W))
        for strategy in (
            tf.distribute.OneDeviceStrategy("CPU:1"),
            tf.distribute.get_strategy(),
        ):
            with strategy.scope():
                w = tf.Variable(W)
            run = tf.function(lambda: strategy.run(lambda: tf.tanh(tf.matmul(tf.constant(X), w))))
            try:
                with amanda.apply(editing()):
                    found = run()
            except amanda.AmandaError as error:
                print("refused", error)
            else:
                np.testing.assert_allclose(found, wanted, rtol=1e-5)
        """,
    )
