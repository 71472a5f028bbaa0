"""Weights of modules as operators read them, in a file for modules without tools."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import amanda
from amanda_tools.faults import InjectFaults
from amanda_tools.kit.weights.baking_tool import BakingTool
from amanda_tools.prune import Prune
from amanda_tools.steer import Steer

nnx = pytest.importorskip("flax.nnx")
load_file = pytest.importorskip("safetensors.numpy").load_file


TOOLS = [
    Prune(0.5),
    Steer(
        "scale", factor=2.0, neurons=[1], ops=["matmul", "dot_general"], value="inputs", operand=1
    ),
    InjectFaults(["matmul"], site="weight", mode="per_layer", model="scale", count=3, amount=3),
]


@pytest.mark.parametrize("tool", TOOLS)
def test_weights_of_a_module_are_saved_by_their_names(tool: BakingTool, tmp_path: Path) -> None:
    layers = [nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1))]
    model, x = nnx.Sequential(*layers), jnp.ones((1, 4))
    with amanda.apply(tool):
        expected = model(x)
    tool.save_baked(tmp_path)
    saved = load_file(tmp_path / "weights.safetensors")
    assert list(saved) == [f"layers.{n}.{name}" for n in (0, 1) for name in ("kernel", "bias")]
    assert not np.array_equal(model(x), expected)
    for number, layer in enumerate(layers):
        layer.kernel[...] = jnp.asarray(saved[f"layers.{number}.kernel"])
    assert np.array_equal(model(x), expected)
