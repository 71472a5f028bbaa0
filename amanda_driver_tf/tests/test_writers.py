"""What is written, read or exported of a model under tools is what it is without them."""

# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

import copy
import pickle
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda

keras = pytest.importorskip("keras")
h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Product(tf.Module):
    def __init__(self) -> None:
        self.w = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    @tf.function(input_signature=[tf.TensorSpec((None, 2))])
    def __call__(self, x: Any) -> Any:
        return tf.matmul(x, self.w)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    layers = [keras.layers.Dense(3, activation="relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.layers.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    return Product(), model


def in_checkpoint(prefix: str) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(prefix)
    return {name: reader.get_tensor(name) for name in sorted(reader.get_variable_to_shape_map())}


def in_h5(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def in_folder(write: Callable[[Path], object]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "it"))
        return in_checkpoint(f"{folder}/it/variables/variables")


def in_file(ending: str, write: Callable[[Path], object]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"it{ending}")
        write(path)
        if ending == ".keras":
            with zipfile.ZipFile(path) as archive:
                path = Path(archive.extract("model.weights.h5", folder))
        return in_h5(path)


def checkpoint(product: Any, model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        kept = tf.train.Checkpoint(product=product, model=model)
        return in_checkpoint(kept.write(f"{folder}/it"))


def managed(product: Any, model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, tf.device("cpu"):
        with amanda.disabled():
            kept = tf.train.Checkpoint(product=product)
        return in_checkpoint(tf.train.CheckpointManager(kept, folder, 1).save())


def loaded(product: Any, model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        weights, path = f"{folder}/it.weights.h5", f"{folder}/it.keras"
        with amanda.disabled():
            prefix = tf.train.Checkpoint(w=product.w).write(f"{folder}/it")
            model.save_weights(weights)
            model.save(path)
            other, variable = keras.models.clone_model(model), tf.Variable(tf.zeros((2, 2)))
        other.load_weights(weights)
        tf.train.Checkpoint(w=variable).read(prefix)
        new = keras.models.load_model(path)
        with amanda.disabled():
            return [*other.get_weights(), *new.get_weights(), variable.numpy()]


def frozen(product: Any, model: Any) -> Any:
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    function = product.__call__.get_concrete_function()
    nodes = convert_variables_to_constants_v2(function).graph.as_graph_def().node
    return [node.attr["value"].tensor.tensor_content for node in nodes if node.op == "Const"]


def copied(product: Any, model: Any) -> Any:
    one, other = copy.deepcopy(product), pickle.loads(pickle.dumps(model))
    with amanda.disabled():
        return [one.w.numpy(), *other.get_weights()]


#: What a program may write -> whether it warns if a tool edits.
PROGRAMS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "saved_model": (lambda one, _: in_folder(lambda p: tf.saved_model.save(one, str(p))), True),
    "export": (lambda _, model: in_folder(lambda p: model.export(p, verbose=False)), True),
    "checkpoint": (checkpoint, True),
    "manager": (managed, True),
    "keras": (lambda _, model: in_file(".keras", model.save), True),
    "h5": (lambda _, model: in_file(".h5", model.save), True),
    "weights": (lambda _, model: in_file(".weights.h5", model.save_weights), True),
    "get_weights": (lambda _, model: model.get_weights(), True),
    "loaded": (loaded, False),
    "frozen": (frozen, True),
    "copied": (copied, True),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(one, other))


class AddsOne(amanda.Tool):
    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: amanda.OpContext) -> None:
        def add(*values: Any) -> Any:
            return [v + 1.0 if tf.is_tensor(v) and v.dtype.is_floating else v for v in values]

        context.insert_after_op(add)


class Counts(amanda.Tool):
    """Promises nothing, and only counts."""

    def __init__(self) -> None:
        self.count = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.add)

    def add(self, *values: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_written_is_that_without_tools(name: str, models: tuple[Any, Any]) -> None:
    program, warns = PROGRAMS[name]

    def run(*tools: amanda.Tool) -> tuple[Any, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with amanda.apply(*tools):
                found = program(*models)
        ours = [str(w.message) for w in caught if issubclass(w.category, amanda.AmandaWarning)]
        return found, ours

    expected, _ = run()
    found, said = run(Counts())
    assert same(found, expected)
    assert not said
    found, said = run(AddsOne())
    assert same(found, expected)
    assert len(said) == warns, said
    assert all("without the changes of AddsOne" in one for one in said)
