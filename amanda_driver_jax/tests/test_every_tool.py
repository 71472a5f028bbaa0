"""Every tool that ships on a training step of a Flax model, eager and jitted."""

# mypy: allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from every_tool import EDITING, TOOLS, checked
from flax import nnx

import amanda

X = jax.random.normal(jax.random.key(1), (4, 6, 6, 4))
#: Tool -> why it does nothing here, as its result says.
UNSUPPORTED = {
    "effective_path": "there are no rules for its operators",
    "rewrite": "none of the rules is for jax",
    "rematerialize": "only what PyTorch's autograd saves in eager mode can be evicted",
}


class Net(nnx.Module):
    """A residual block with a normalization, and a linear layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(jax.nn.relu(self.norm(self.conv(x)) + x).mean((1, 2)))


def step(model: Net, x: Any) -> Any:
    """Return the loss, and write the parameters."""

    def loss(model: Net) -> Any:
        return (jax.nn.logsumexp(model(x), axis=1) - 1.0).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    parameters = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda new, old: old - 0.1 * new, gradients, parameters))
    return value


@cache
def plain(jitted: bool) -> list[np.ndarray[Any, Any]]:
    return program(jitted)


def program(jitted: bool) -> list[np.ndarray[Any, Any]]:
    """Return the losses of two steps, and the model's state."""
    model, run = Net(), nnx.jit(step) if jitted else step
    losses = [run(model, X) for _ in range(2)]
    return [np.asarray(value) for value in (*losses, *jax.tree.leaves(nnx.state(model)))]


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", TOOLS | EDITING)
def test_the_program_runs_as_without_it(name: str, jitted: bool) -> None:
    expected, tool = plain(jitted), (TOOLS | EDITING)[name]()
    with amanda.apply(tool):
        found = program(jitted)
    checked(name, tool)
    for one, other in zip(found, expected, strict=True):
        # Compiled programs are fused otherwise, and so are the gradients of one operator.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    reason = UNSUPPORTED.get(name.split()[0])
    if reason is not None:
        assert any(
            f"not supported on jax/{jax.__version__}" in note and reason in note
            for note in tool.result().notes
        )
