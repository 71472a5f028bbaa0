"""The FLOPs profiler over PyTorch and TensorFlow's modes: one figure, and that of the layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.flops import Flops, FlopsResult

from .models import STEPS, WEIGHTS, assert_same_bits
from .test_builtin_tools import reference
from .test_portable_tools import backends, built_mostly_before, instrumented


def count(program: Callable[[], Any], **options: Any) -> FlopsResult:
    tool = Flops(**options)
    with amanda.apply(tool):
        program()
    return tool.result()


@built_mostly_before
@backends
def test_the_same_figures_everywhere(backend: str, inside: bool) -> None:
    tool = Flops()
    record = instrumented(backend, inside, tool)
    assert_same_bits(record, reference(backend, False))
    found = tool.result()
    assert found.unknown == []
    assert found.macs == STEPS * sum(FORWARD)
    # The gradient of the images is not requested. Nevertheless TensorFlow computes it in eager
    # mode, and so does the backward function of a function.
    wasted = backend in ("tensorflow eager", "tensorflow function")
    assert found.backward_macs == STEPS * (2 * sum(FORWARD) - (0 if wasted else FORWARD[0]))


#: Layers of the network of `models`, in order.
FORWARD = [41472, 6912, 2048, 320]


def test_the_layers_of_the_network() -> None:
    tool = Flops()
    instrumented("pytorch", False, tool)
    found = [op.macs // STEPS for op in tool.result().ops]
    assert found == FORWARD
    # Each is a multiple of its weight: once for each image and place.
    weights = [value.size for name, value in WEIGHTS.items() if value.ndim > 1]
    assert [macs % weight for macs, weight in zip(found, weights, strict=True)] == [0] * 4


# TensorFlow.


def layers() -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.DepthwiseConv2D(3, depth_multiplier=2),
            keras.layers.Conv2DTranspose(2, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )


#: The same for one image: places of the output (of the input, where transposed) times the filter.
LAYERS = 36 * 4 * 27 + 16 * 8 * 9 + 16 * 8 * 9 * 2 + 72 * 5


def test_keras_in_each_of_its_modes() -> None:
    model = layers()
    x = np.ones((3, 8, 8, 3), np.float32)
    found = count(lambda: model(x))
    assert found.macs == 3 * LAYERS
    name = model.name
    modules = found.by_module()
    assert modules[name].macs == found.macs
    assert modules[f"{name}/{model.layers[0].name}"].macs == 3 * 36 * 4 * 27
    assert count(lambda: tf.function(model)(x)).macs == 3 * LAYERS
    # The batches are of 2 and of 1: shapes are not known before the graph runs.
    assert count(lambda: model.predict(x, batch_size=2, verbose=0)).macs == 3 * LAYERS
    model.compile("sgd", "mse")
    trained = count(lambda: model.fit(x, np.ones((3, 5)), batch_size=2, verbose=0))
    assert trained.macs == 3 * LAYERS
    # Without the gradient of the images.
    assert trained.backward_macs == 3 * (2 * LAYERS - 36 * 4 * 27)
    assert trained.unknown == []


def test_gradients_whose_operator_a_graph_leaves_out() -> None:
    weight = tf.Variable(tf.ones((3, 4)))

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.ones((2, 3)) @ weight)
        return tape.gradient(loss, weight)  # The loss itself is not requested.

    found = count(tf.function(gradient))
    assert (found.macs, found.backward_macs) in ((0, 24), (24, 24))
    assert found.unknown == []


def test_a_session_computes_and_counts_no_gradient_that_nothing_reads() -> None:
    v1 = tf.compat.v1

    def executed(metadata: Any) -> list[str]:
        nodes = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
        names = (node.node_name.rpartition("gradients/")[2] for node in nodes)
        return sorted(name for name in names if name.startswith("layer") and "/MatMul" in name)

    ran = []
    with tf.Graph().as_default(), v1.Session() as session:
        images = v1.placeholder(tf.float32, [5, 2])
        weights = [tf.Variable(np.ones(s, np.float32), trainable=True) for s in ((2, 3), (3, 4))]
        found = tf.nn.relu(tf.matmul(images, weights[0], name="layer0"))
        loss = tf.reduce_sum(tf.square(tf.matmul(found, weights[1], name="layer1")))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=weights)
        session.run(v1.global_variables_initializer())
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)

        def run() -> None:
            metadata = v1.RunMetadata()
            session.run(train, {images: np.ones((5, 2), np.float32)}, options, metadata)
            ran.append(executed(metadata))

        run()
        counted = count(run)
    assert ran[0] == ran[1]
    assert len(ran[0]) == 3
    assert (counted.macs, counted.backward_macs) == (5 * (6 + 12), 5 * (6 + 2 * 12))
    assert counted.notes == [
        "not counted, as the graph does not compute it: gradients/layer0_grad/MatMul"
    ]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_closed_forms(graph: bool) -> None:
    def macs(function: Callable[[], Any]) -> int:
        found = count(tf.function(function) if graph else function)
        assert found.unknown == []
        return found.macs

    ones, initial = tf.ones, tf.Variable
    left, right = initial(ones((4, 3))), initial(ones((5, 4)))
    assert macs(lambda: tf.matmul(left, right, transpose_a=True, transpose_b=True)) == 60
    rows = initial(ones((2, 5, 4)))
    assert macs(lambda: tf.einsum("...ij,kj->...ik", rows, right)) == 200
    stack = initial(ones((2, 3, 4)))
    assert macs(lambda: tf.matmul(stack, stack, adjoint_b=True)) == 2 * 9 * 4
    sparse = tf.sparse.from_dense(np.eye(4, dtype=np.float32))
    assert macs(lambda: tf.sparse.sparse_dense_matmul(sparse, left)) == 12
    image = initial(ones((1, 8, 8, 4)))
    volume = initial(ones((1, 4, 4, 4, 2)))
    kernel = initial(ones((2, 2, 2, 2, 3)))
    assert macs(lambda: tf.nn.conv3d(volume, kernel, [1] * 5, "VALID")) == 27 * 3 * 16
    strided = initial(ones((3, 3, 4, 6)))
    assert macs(lambda: tf.nn.conv2d(image, strided, 2, "SAME")) == 16 * 6 * 36
    attention = keras.layers.MultiHeadAttention(2, 4)
    y = ones((2, 3, 8))
    attention(y, y)
    assert macs(lambda: attention(y, y)) == 2 * (4 * 3 * 64 + 2 * 2 * 9 * 4)


def test_the_figure_of_tensorflow_s_own_profiler() -> None:
    # It counts two operations per product, and those of biases as well, so this model has no
    # biases.
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3), batch_size=2),
            keras.layers.Conv2D(8, 3, 2, use_bias=False, padding="same"),
            keras.layers.DepthwiseConv2D(3, use_bias=False),
            keras.layers.Flatten(),
            keras.layers.Dense(7, use_bias=False),
        ]
    )
    x = tf.ones((2, 16, 16, 3))
    graph = tf.function(model).get_concrete_function(x).graph
    v1 = tf.compat.v1
    options = v1.profiler.ProfileOptionBuilder.float_operation()
    quiet = v1.profiler.ProfileOptionBuilder(options).with_empty_output().build()
    profile = v1.profiler.profile(graph, options=quiet)
    assert count(lambda: model(x)).flops == profile.total_float_ops


def test_a_function_that_is_traced_for_several_shapes() -> None:
    weight = tf.Variable(tf.ones((4, 3)))
    function = tf.function(lambda x: tf.matmul(x, weight))
    rows = (2, 3, 5)
    found = count(lambda: [function(tf.ones((n, 4))) for n in rows], backward=False)
    assert found.macs == sum(n * 4 * 3 for n in rows)


@pytest.mark.filterwarnings("ignore:A function that XLA should compile")
def test_recurrence_in_a_loop() -> None:
    layer = keras.layers.LSTM(5)
    x = tf.ones((2, 3, 8))
    layer(x)
    assert count(lambda: tf.function(layer)(x)).macs == 2 * 3 * 20 * (8 + 5)


def test_what_is_unknown_is_listed() -> None:
    found = count(lambda: tf.linalg.inv(tf.eye(3)) @ tf.signal.dct(tf.ones((3, 3))))
    assert found.macs == 27
    assert {"MatrixInverse"} <= {op.type for op in found.unknown}
    assert {op.word for op in found.unknown} == {"inverse", "fft"}


# Keras' classifiers. Its ResNet-50 strides in the first convolution of a block, as the paper's.


def closed_form(model: Any) -> int:
    """Return the multiply-accumulates of one image, from the shapes of the layers alone."""
    total = 0
    for layer in model.layers:
        if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense)):
            shape = layer.output.shape[1:]
            places = math.prod(shape[:-1])
            total += places * math.prod(layer.kernel.shape)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side", "published"),
    [
        ("ResNet50", 224, 3.858),
        ("VGG19", 224, 19.632),
        ("InceptionV3", 299, 5.713),
    ],
)
def test_published_figures(name: str, side: int, published: float) -> None:
    model = getattr(keras.applications, name)(weights=None)
    x = tf.random.uniform((1, side, side, 3))
    found = count(lambda: model(x, training=False))
    assert found.macs == closed_form(model)
    assert found.macs / 1e9 == pytest.approx(published, abs=0.001)
    assert found.unknown == []
