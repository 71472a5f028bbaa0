"""Weights of modules as operators read them, in a file for modules without tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
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


X = jax.random.normal(jax.random.key(2), (3, 4))
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


class Net(nnx.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.a, self.b = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return self.b(jnp.tanh(self.a(x)))


def _trained(net: Net, around: Callable[[Any], Any]) -> None:
    def step(net: Net, x: Any) -> None:
        gradients = nnx.grad(lambda net: (net(x) ** 2).sum())(net)
        state = nnx.state(net, nnx.Param)
        nnx.update(net, jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients))

    run = around(step)
    for _ in range(3):
        run(net, X)


@pytest.mark.parametrize("around", [lambda step: step, nnx.jit], ids=["eager", "jit"])
def test_weights_of_a_trained_module_are_those_of_now(
    around: Callable[[Any], Any], tmp_path: Path
) -> None:
    net, tool = Net(), Prune(0.5)
    with amanda.apply(tool):
        _trained(net, around)
    tool.save_baked(tmp_path)
    saved = load_file(tmp_path / "weights.safetensors")
    masks = load_file(tmp_path / "state.safetensors")
    for name, layer in (("a", net.a), ("b", net.b)):
        kernel, mask = np.asarray(layer.kernel[...]), masks[f"mask/{name}.kernel"]
        assert np.array_equal(saved[f"{name}.kernel"], kernel * mask)
        assert np.array_equal(saved[f"{name}.bias"], layer.bias[...])
    assert (masks["mask/a.kernel"] == 0).sum() == 16


def test_weights_of_a_jitted_function_are_those_of_its_last_call(tmp_path: Path) -> None:
    net, tool = Net(), Prune(0.5)
    graph, state = nnx.split(net)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    double = jax.tree.map(lambda value: 2 * value, state)
    with amanda.apply(tool):
        run(state, X)
        run(double, X)
    tool.save_baked(tmp_path / "module")
    saved = load_file(tmp_path / "module" / "weights.safetensors")
    kernel, mask = np.asarray(net.a.kernel[...]), saved["a.kernel"] != 0
    assert np.array_equal(saved["a.kernel"], 2 * kernel * mask)

    other, parameters = Prune(0.5), {"w": net.a.kernel[...], "v": net.b.kernel[...]}
    plain = jax.jit(lambda p, x: x @ p["w"] @ p["v"])
    with amanda.apply(other):
        plain(parameters, X)
        plain({name: 3 * value for name, value in parameters.items()}, X)
    other.save_baked(tmp_path / "tree")
    found = load_file(tmp_path / "tree" / "weights.safetensors")
    assert np.array_equal(found["w"], np.asarray(3 * parameters["w"]) * (found["w"] != 0))
    assert sorted(found) == ["v", "w"]
