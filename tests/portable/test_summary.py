"""The summary of modules of Keras: where layers are called, and in graphs."""

from __future__ import annotations

import keras
import tensorflow as tf

import amanda
from amanda_tools.sensitivity import Sensitivity
from amanda_tools.summary import Summary, SummaryResult


def model() -> keras.Sequential:
    inner = keras.Sequential([keras.layers.Input((8, 8, 4)), keras.layers.Conv2D(4, 3)])
    return keras.Sequential(
        [
            keras.layers.Input((10, 10, 3)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            inner,
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )


#: Of one image.
MACS = 8 * 8 * 4 * 3 * 9 + 6 * 6 * 4 * 4 * 9 + 4 * 2


def totals(result: SummaryResult, depth: int) -> list[int]:
    return [row.parameters for row in result.modules if row.depth == depth]


def test_layers_that_are_called() -> None:
    net = model()
    tool = Summary()
    with amanda.apply(tool):
        net(tf.ones((5, 10, 10, 3)))
        net(tf.ones((7, 10, 10, 3)))
    result = tool.result()
    assert (result.parameters, result.macs) == (net.count_params(), 5 * MACS)
    outermost, *layers = result.modules
    assert (outermost.type, outermost.output) == ("Sequential", [5, 2])
    inside = [row for row in layers if row.depth == 1]
    assert [row.type for row in inside] == [type(layer).__name__ for layer in net.layers]
    assert totals(result, 1) == [layer.count_params() for layer in net.layers]
    assert [tuple(row.output or ())[1:] for row in inside] == [
        layer.output.shape[1:] for layer in net.layers
    ]


def test_a_graph_that_is_built_for_training_and_for_validation() -> None:
    net = model()
    net.compile("sgd", "mse")
    data = tf.ones((6, 10, 10, 3)), tf.ones((6, 2))
    tool = Summary()
    with amanda.apply(tool):
        net.fit(*data, batch_size=6, epochs=2, verbose=0, validation_data=data)
    result = tool.result()
    assert (result.parameters, result.macs) == (net.count_params(), 6 * MACS)
    assert totals(result, 1)[:5] == [layer.count_params() for layer in net.layers]


def test_sensitivity_lists_an_operator_of_two_graphs_once() -> None:
    net = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    net.compile("sgd", "mse")
    data = tf.ones((6, 4)), tf.ones((6, 2))
    tool = Sensitivity()
    with amanda.apply(tool):
        net.fit(*data, batch_size=6, epochs=2, verbose=0, validation_data=data)
    names = [op.name for op in tool.result().ops]
    assert len(names) == 2
    assert len(set(names)) == 2
