"""`capture` and `steer` on the arguments and results of modules of Flax and Equinox."""

# mypy: allow-untyped-decorators, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from amanda import Tool, apply
from amanda_tools.capture import Capture
from amanda_tools.steer import Steer

X = jax.random.normal(jax.random.key(1), (4, 8))


class Net(nnx.Module):
    def __init__(self) -> None:
        self.a, self.b = nnx.Linear(8, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 2, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return self.b(jnp.tanh(self.a(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2, name="b")(jnp.tanh(nn.Dense(6, name="a")(x)))


class Base(eqx.Module):
    a: Any
    b: Any

    def __call__(self, x: Any) -> Any:
        return self.b(jnp.tanh(self.a(x)))


class EquinoxNet(Base):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x)


def _nnx() -> tuple[Callable[[Any], Any], Callable[[Any], Any], Any]:
    net = Net()
    return lambda x: net(x), net.a, net.b.bias[...]


def _linen() -> tuple[Callable[[Any], Any], Callable[[Any], Any], Any]:
    net = LinenNet()
    given = net.init(jax.random.key(0), X)
    a = given["params"]["a"]
    return lambda x: net.apply(given, x), lambda x: x @ a["kernel"] + a["bias"], jnp.zeros(2)


def _equinox() -> tuple[Callable[[Any], Any], Callable[[Any], Any], Any]:
    keys = jax.random.split(jax.random.key(0))
    net = EquinoxNet(eqx.nn.Linear(8, 6, key=keys[0]), eqx.nn.Linear(6, 2, key=keys[1]))
    return jax.vmap(net), jax.vmap(net.a), net.b.bias


@pytest.mark.parametrize("make", [_nnx, _linen, _equinox])
@pytest.mark.parametrize("around", [lambda run: run, jax.jit], ids=["eager", "jit"])
def test_values_of_modules_are_captured_and_changed(
    make: Callable[[], Any], around: Callable[[Any], Any]
) -> None:
    run, first, bias = make()
    classes = {cls: vars(cls)["__call__"] for cls in (Net, LinenNet, Base, EquinoxNet)}
    plain, hidden = run(X), first(X)
    tool = Capture(modules=["a", "b"], values=["inputs", "outputs"])
    with apply(tool):
        assert np.allclose(around(run)(X), plain, atol=1e-6)
    result = tool.result()
    assert not result.notes
    for name, what, expected in (
        ("a", "input", X),
        ("a", "output", hidden),
        ("b", "input", jnp.tanh(hidden)),
        ("b", "output", plain),
    ):
        # Of a mapped function each example comes by itself, in any order.
        rows = [
            np.reshape(result.read(value), (-1, np.shape(expected)[-1]))
            for value in result.values
            if (result.ops[value.op].module, value.what) == (name, what)
        ]
        found = np.concatenate(rows)
        assert np.allclose(_sorted(found), _sorted(np.asarray(expected)), atol=1e-6)

    steered = Steer("ablate", modules=["a"])
    with apply(steered):
        changed = around(run)(X)
    # Nothing but the bias of the last layer is left.
    assert np.allclose(changed, jnp.broadcast_to(bias, changed.shape), atol=1e-6)
    assert [op.module for op in steered.result().ops] == ["a"]
    assert np.array_equal(run(X), plain)
    assert {cls: vars(cls)["__call__"] for cls in classes} == classes


def _sorted(rows: Any) -> Any:
    return rows[np.lexsort(rows.T)]


def test_gradients_pass_what_is_shown_of_modules() -> None:
    net = Net()
    expected = nnx.grad(lambda net: (net(X) ** 2).sum())(net)
    with apply(Capture(modules=["*"])):
        found = nnx.jit(nnx.grad(lambda net: (net(X) ** 2).sum()))(net)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.allclose(one, other, atol=1e-5)
    with apply(Steer("scale", factor=2.0, modules=["b"])):
        doubled = net(X)
    assert np.allclose(doubled, 2 * net(X), atol=1e-6)


def test_the_first_array_of_a_structure_is_shown() -> None:
    class Pair(nnx.Module):
        def __call__(self, pair: dict[str, Any]) -> tuple[Any, list[Any]]:
            return None, [pair["x"] + 1, pair["y"]]

    given = {"x": jnp.ones(3), "y": jnp.zeros(2)}
    with apply(Steer("scale", factor=3.0, modules=["*"])):
        nothing, (first, second) = Pair()(given)
    assert nothing is None
    assert first.tolist() == [6.0] * 3
    assert second.tolist() == [0.0] * 2
    with apply(Steer("scale", factor=3.0, modules=["*"], value="inputs")):
        _, (first, _) = Pair()(given)
    assert first.tolist() == [4.0] * 3
    assert given["x"].tolist() == [1.0] * 3


def test_a_constant_of_numpy_is_shown_under_every_transformation() -> None:
    class Watches(Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(lambda context: None, backward=True)

    keys, given = jax.random.key(0), np.asarray(X)
    layer = eqx.nn.Linear(8, 2, key=keys)
    step = eqx.filter_jit(eqx.filter_grad(lambda layer: jax.vmap(layer)(given).sum()))
    expected = step(layer)
    with apply(Capture(modules=["*"], values=["inputs", "outputs"]), Watches()):
        found = step(layer)
    assert np.allclose(found.weight, expected.weight, atol=1e-5)
