"""Weights of Keras models as operators read them, in files for models without tools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import amanda
from amanda_tools.faults import InjectFaults
from amanda_tools.kit.weights.baking_tool import BakingTool
from amanda_tools.prune import Prune
from amanda_tools.steer import Steer

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
load_file = pytest.importorskip("safetensors.numpy").load_file


TOOLS = [
    Prune(0.5),
    Steer("scale", factor=2.0, neurons=[1], ops=["matmul"], value="inputs", operand=1),
    InjectFaults(["matmul"], site="weight", mode="per_layer", model="scale", count=3, amount=3),
]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="Keras runs on another backend")
def test_weights_of_keras_are_saved_by_their_paths_and_written(
    tool: BakingTool, tmp_path: Path
) -> None:
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    x = tf.ones((1, 4))
    with amanda.apply(tool):
        expected = model(x)
    own = {variable.path: variable.numpy() for variable in model.variables}
    tool.save_baked(tmp_path)
    saved = load_file(tmp_path / "weights.safetensors")
    (about,) = json.loads((tmp_path / "weights.json").read_text())["models"].values()
    changed = [path for path in own if path.endswith("kernel")]
    assert about["changed"] == changed
    assert saved.keys() == own.keys()
    for path, values in saved.items():
        assert np.array_equal(values, own[path]) == (path not in changed)
        assert values.dtype == own[path].dtype
    assert not np.array_equal(model(x), expected)
    other = keras.models.clone_model(model)
    for variable, path in zip(other.variables, own, strict=True):
        variable.assign(saved[path])
    assert np.array_equal(other(x), expected)
    assert tool.bake(model) == changed
    assert np.array_equal(model(x), expected)
