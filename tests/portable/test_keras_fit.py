"""Keras' training loop under a pruning tool, and the files that are written during it.

The tool is that of `tools`. The reference is the same model with masks written into its layers by
hand. Files are loaded again in a process that cannot import Amanda.
"""

from __future__ import annotations

import collections
import contextlib
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from program_server import ProgramServer
from tensorflow.core.protobuf import saved_model_pb2

import amanda
from amanda_tools.prune import Prune

from .tools import Array, Count, MagnitudePrune, magnitude_mask

#: What is written under tools has none of their changes, and they say so.
pytestmark = pytest.mark.filterwarnings("ignore:.*without the changes of:amanda.AmandaWarning")

v1 = tf.compat.v1

SPARSITY = 0.6
EPOCHS = 2
_random = np.random.default_rng(0)
X = _random.normal(size=(48, 8, 8, 3)).astype(np.float32)
Y = _random.integers(0, 3, 48)


class _Masked:
    """A layer whose kernel is multiplied by a mask, which is differentiated."""

    mask: Array | None = None
    kernel: Any
    bias: Any

    def product(self, x: Any, kernel: Any) -> Any:
        raise NotImplementedError

    def call(self, x: Any) -> Any:
        kernel = self.kernel if self.mask is None else self.kernel * self.mask
        return self.activation(self.product(x, kernel) + self.bias)  # type: ignore[attr-defined]


# Keras has no types.
class MaskedConv2D(_Masked, keras.layers.Conv2D):  # type: ignore[misc]
    """A convolution with a mask."""

    def product(self, x: Any, kernel: Any) -> Any:
        return keras.ops.conv(x, kernel, padding="same")


class MaskedDepthwise(_Masked, keras.layers.DepthwiseConv2D):  # type: ignore[misc]
    """A depthwise convolution with a mask."""

    def product(self, x: Any, kernel: Any) -> Any:
        return keras.ops.depthwise_conv(x, kernel, padding="same")


class MaskedDense(_Masked, keras.layers.Dense):  # type: ignore[misc]
    """A dense layer with a mask."""

    def product(self, x: Any, kernel: Any) -> Any:
        return keras.ops.matmul(x, kernel)


LAYOUTS = {MaskedConv2D: "HWIO", MaskedDepthwise: "HWIM", MaskedDense: "IO"}


def network(masked: bool = False) -> Any:
    """Return a model with the same weights each time."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    convolution = MaskedConv2D if masked else layers.Conv2D
    depthwise = MaskedDepthwise if masked else layers.DepthwiseConv2D
    dense = MaskedDense if masked else layers.Dense
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            convolution(6, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            depthwise(3, padding="same", depth_multiplier=2),
            layers.Flatten(),
            dense(10, activation="relu"),
            layers.Dropout(0.2, seed=1),
            dense(3),
        ]
    )


def compiled(model: Any, optimizer: str, **options: Any) -> Any:
    optimizers = {
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01),
    }
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers[optimizer](), loss, metrics=["accuracy"], **options)
    return model


def mask_by_hand(model: Any) -> None:
    """Set the masks from the layers' current weights."""
    for layer in model.layers:
        if isinstance(layer, _Masked):
            kernel = np.asarray(layer.kernel)
            layer.mask = magnitude_mask(kernel, LAYOUTS[type(layer)], SPARSITY)


def fit(model: Any, epochs: int = EPOCHS) -> Array:
    """Return the loss of each epoch."""
    history = model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return np.array(history.history["loss"])


def assert_same_weights(one: Any, other: Any, tolerance: float) -> None:
    for ours, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["function", "eagerly"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_fit(optimizer: str, run_eagerly: bool, staged: bool) -> None:
    reference = compiled(network(masked=True), optimizer, run_eagerly=run_eagerly)
    mask_by_hand(reference)
    expected = fit(reference)
    model = compiled(network(), optimizer, run_eagerly=run_eagerly)
    dense = model.get_weights()
    prune = MagnitudePrune(SPARSITY, staged=staged)
    with amanda.apply(prune):
        losses = fit(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_weights(model, reference, 1e-5)
    # The tool's losses are those of a pruned model, and what it pruned has never moved.
    plain = fit(compiled(network(), optimizer, run_eagerly=run_eagerly))
    assert not np.allclose(losses, plain, rtol=1e-3)
    masks = [layer.mask for layer in reference.layers if isinstance(layer, _Masked)]
    ours, before = ([w for w in ws if w.ndim in (2, 4)] for ws in (model.get_weights(), dense))
    for kernel, start, mask in zip(ours, before, masks, strict=True):
        assert np.array_equal(kernel[mask == 0], start[mask == 0])
        assert not np.array_equal(kernel[mask == 1], start[mask == 1])


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["function", "eagerly"])
def test_evaluate_and_predict(run_eagerly: bool) -> None:
    reference, model = (
        compiled(network(masked), "momentum", run_eagerly=run_eagerly) for masked in (True, False)
    )
    mask_by_hand(reference)
    with amanda.apply(MagnitudePrune(SPARSITY)):
        evaluated = model.evaluate(X, Y, batch_size=16, verbose=0)
        predicted = model.predict(X, batch_size=16, verbose=0)
    np.testing.assert_allclose(
        evaluated, reference.evaluate(X, Y, batch_size=16, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(predicted, reference.predict(X, batch_size=16, verbose=0), atol=1e-6)
    assert not np.allclose(predicted, model.predict(X, batch_size=16, verbose=0), atol=1e-3)


@pytest.mark.slow
def test_fit_traced_before() -> None:
    # The train function is there already when the tool comes, and is used again after it.
    reference, model = (compiled(network(masked), "momentum") for masked in (True, False))
    # Processors differ in how they round what only one of the two graphs fuses.
    np.testing.assert_allclose(fit(reference), fit(model), rtol=1e-6)
    mask_by_hand(reference)
    reference.make_train_function(force=True)
    expected = fit(reference)
    prune = MagnitudePrune(SPARSITY)
    with amanda.apply(prune):
        losses = fit(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_weights(model, reference, 1e-5)
    for layer in reference.layers:
        if isinstance(layer, _Masked):
            layer.mask = None
    reference.make_train_function(force=True)
    np.testing.assert_allclose(fit(model, 1), fit(reference, 1), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"jit_compile": True}, {"steps_per_execution": 3}], ids=str)
def test_fit_compiled_otherwise(options: dict[str, Any]) -> None:
    reference = compiled(network(masked=True), "momentum")
    mask_by_hand(reference)
    expected = fit(reference)
    model, prune = compiled(network(), "momentum", **options), MagnitudePrune(SPARSITY)
    count = Count("conv2d")
    notice: Any = contextlib.nullcontext()
    if "jit_compile" in options:
        # XLA runs no Python: the function runs without it, and says so.
        notice = pytest.warns(amanda.AmandaWarning)
    with notice, amanda.apply(prune, count):
        losses = fit(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    batches = EPOCHS * len(X) // 16
    assert count.forward["conv2d"] == count.backward["conv2d"] == 2 * batches


# Files.


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Return every file, including those inside archives."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        yield path.name, path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    yield f"{path.name}/{name}", archive.read(name)


def assert_no_trace(folder: Path) -> None:
    names = []
    for name, data in contents(folder):
        names.append(name)
        for trace in (b"amanda", b"pyfunc"):
            assert trace not in data.lower(), f"{trace!r} is in {name}"
    assert names


def op_types(path: Path) -> collections.Counter[str]:
    """Return the op types of a SavedModel, including those of its functions."""
    model = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    found: collections.Counter[str] = collections.Counter()
    for graph in model.meta_graphs:
        found.update(node.op for node in graph.graph_def.node)
        for function in graph.graph_def.library.function:
            found.update(node.op for node in function.node_def)
    return found


@pytest.fixture(scope="module")
def without_amanda() -> Iterator[ProgramServer]:
    """Start a process that cannot import Amanda."""
    start = """
        import sys
        for name in ("amanda", "amanda_core", "amanda_driver_tf", "amanda_tools"):
            sys.modules[name] = None
        import numpy as np, tensorflow as tf
        v1 = tf.compat.v1
        """
    with ProgramServer(textwrap.dedent(start)) as server:
        yield server


def save(model: Any, folder: Path) -> None:
    """Save the model in every format."""
    folder.mkdir(exist_ok=True)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    model.export(folder / "exported", verbose=False)
    tf.saved_model.save(model, folder / "saved")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "checkpoint" / "c")


# Keras reads variables as arrays in a way that NumPy is about to end.
old_arrays = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.slow
@old_arrays
def test_files_written_under_tools_hold_nothing_of_them(tmp_path: Path) -> None:
    model = compiled(network(), "momentum")
    with amanda.apply(MagnitudePrune(SPARSITY), Count("conv2d", "matmul", "relu")):
        fit(model)
        model.predict(X, verbose=0)
        save(model, tmp_path / "under tools")
    save(model, tmp_path / "plain")
    assert_no_trace(tmp_path / "under tools")
    for name in ("exported", "saved"):
        types = [op_types(tmp_path / kind / name) for kind in ("under tools", "plain")]
        assert types[0] == types[1]
        assert types[0]["Conv2D"] >= 1
    variables = [
        tf.train.list_variables(tmp_path / kind / "checkpoint") for kind in ("under tools", "plain")
    ]
    assert variables[0] == variables[1]


@pytest.mark.slow
@old_arrays
def test_files_written_under_tools_load_without_amanda(
    without_amanda: ProgramServer, tmp_path: Path
) -> None:
    model = compiled(network(), "momentum")
    with amanda.apply(MagnitudePrune(SPARSITY)):
        fit(model)
        save(model, tmp_path)
    # Outside: the files hold the weights as they are, of which the tool prunes none.
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "expected.npy", model.predict(X, verbose=0))
    np.savez(tmp_path / "weights.npz", *model.get_weights())
    program = """
        import keras
        folder = sys.argv[1]
        x, expected = np.load(f"{folder}/x.npy"), np.load(f"{folder}/expected.npy")
        weights = list(np.load(f"{folder}/weights.npz").values())
        model = keras.models.load_model(f"{folder}/model.keras")
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
        for one, other in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, other)
        for variable in model.variables:
            variable.assign(tf.zeros_like(variable))
        model.load_weights(f"{folder}/model.weights.h5")
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
        for variable in model.variables:
            variable.assign(tf.zeros_like(variable))
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.restore(tf.train.latest_checkpoint(f"{folder}/checkpoint")).expect_partial()
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
        exported = tf.saved_model.load(f"{folder}/exported")
        np.testing.assert_allclose(exported.serve(x), expected, atol=1e-6)
        saved = tf.saved_model.load(f"{folder}/saved")
        serve = saved.signatures["serving_default"]
        (name,) = serve.structured_input_signature[1]
        (served,) = serve(**{name: tf.constant(x)}).values()
        np.testing.assert_allclose(served, expected, atol=1e-6)
        model.fit(x, np.zeros(len(x)), verbose=0)
        print("loaded")
        """
    output = without_amanda.check(textwrap.dedent(program), tmp_path)
    assert output.splitlines()[-1] == "loaded"


def session_program(resource: bool, folder: Path, tools: Iterable[amanda.Tool]) -> tuple[Any, Any]:
    """Train and save a graph with a saver created before the tools; return GraphDef and weights."""
    graph = tf.Graph()
    with graph.as_default(), v1.Session(graph=graph) as session:
        x = v1.placeholder(tf.float32, [48, 8, 8, 3], name="x")
        shape, initial = [3, 3, 3, 4], v1.initializers.he_normal(seed=0)
        kernel = v1.get_variable("kernel", shape, initializer=initial, use_resource=resource)
        y = tf.identity(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")), name="y")
        loss = tf.reduce_mean(tf.square(y - 1.0))
        (gradient,) = v1.gradients(loss, [kernel])
        with tf.control_dependencies([gradient]):
            train = v1.assign_sub(kernel, 0.5 * gradient)
        saver = v1.train.Saver()
        session.run(v1.global_variables_initializer())
        with amanda.apply(*tools):
            for _ in range(3):
                session.run(train.op, {x: X})
            saver.save(session, str(folder / "before"))
            v1.train.Saver([kernel]).save(session, str(folder / "inside"), global_step=3)
            tf.io.write_graph(graph, str(folder), "graph.pbtxt")
        with amanda.apply(*tools):
            # A second set of clones, perhaps.
            session.run(train.op, {x: X})
            definition = graph.as_graph_def()
        v1.train.export_meta_graph(str(folder / "after.meta"))
        return definition, session.run(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_savers_under_tools(resource: bool, without_amanda: ProgramServer, tmp_path: Path) -> None:
    for folder in ("tools", "plain"):
        (tmp_path / folder).mkdir()
    count, prune = Count("conv2d", "relu"), MagnitudePrune(SPARSITY)
    definition, weights = session_program(resource, tmp_path / "tools", [count, prune])
    plain, plain_weights = session_program(resource, tmp_path / "plain", [amanda.Tool()])
    assert count.forward["conv2d"] == count.backward["conv2d"] == 4
    assert not np.allclose(weights, plain_weights)
    assert_no_trace(tmp_path / "tools")
    assert definition == plain
    files = [sorted(path.name for path in (tmp_path / f).iterdir()) for f in ("tools", "plain")]
    assert files[0] == files[1]
    for name in files[0]:
        if name.endswith((".meta", ".pbtxt", ".index")) or name == "checkpoint":
            ours, theirs = ((tmp_path / f / name).read_bytes() for f in ("tools", "plain"))
            ours = ours.replace(str(tmp_path / "tools").encode(), str(tmp_path / "plain").encode())
            # The index has sums of the values, which differ.
            assert ours == theirs or name.endswith(".index"), name
    np.save(tmp_path / "x.npy", X)
    program = """
        folder = sys.argv[1]
        for name in ("before", "inside-3"):
            with tf.Graph().as_default(), v1.Session() as session:
                saver = v1.train.import_meta_graph(f"{folder}/tools/{name}.meta")
                saver.restore(session, f"{folder}/tools/{name}")
                print(session.run("y:0", {"x:0": np.load(f"{folder}/x.npy")}).mean())
        """
    first, second = map(float, without_amanda.check(textwrap.dedent(program), tmp_path).split())
    assert first == second > 0


def test_the_state_of_an_optimizer_is_no_parameter() -> None:
    """What an optimizer keeps for each weight, and what gives it a first value, is not listed."""
    model, prune = compiled(network(), "adam"), Prune(sparsity=0.5)
    with amanda.apply(prune):
        fit(model, 1)
    result = prune.result()
    kernels = [weight for weight in model.trainable_weights if len(weight.shape) > 1]
    assert sorted(weight.name for weight in result.weights) == sorted(w.path for w in kernels)
    assert (result.unreached, result.reached) == ([], sum(int(np.size(w)) for w in kernels))
