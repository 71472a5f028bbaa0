"""Weights behind casts and transpositions are known, and edited as if they were written so."""

# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import amanda
from amanda_driver_jax import arrays
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

X = jax.random.normal(jax.random.key(1), (5, 4))
BF16 = jnp.bfloat16


class Mixed(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.a = nnx.Linear(4, 8, rngs=rngs, dtype=BF16)
        self.b = nnx.Linear(8, 2, rngs=rngs, dtype=BF16)

    def __call__(self, x: Any) -> Any:
        return self.b(nnx.relu(self.a(x)))


class Turned(nnx.Module):
    """Its weights are used in another order of axes, and one also in another dtype."""

    def __init__(self, rngs: Any) -> None:
        self.a = nnx.Param(jax.random.normal(rngs.params(), (8, 4)))
        self.b = nnx.Param(jax.random.normal(rngs.params(), (2, 8)))

    def __call__(self, x: Any) -> Any:
        x = jax.nn.relu(x @ self.a.T)
        return jnp.dot(x.astype(BF16), jnp.swapaxes(self.b[...], 0, 1).astype(BF16))


class Dense(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2, dtype=self.dtype)(nn.relu(nn.Dense(8, dtype=self.dtype)(x)))


def _cast(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.astype(BF16) if eqx.is_inexact_array(leaf) else leaf, tree
    )


def _nnx(kind: Any) -> tuple[Any, Callable[[Any], Any]]:
    graph, tree = nnx.split(kind(nnx.Rngs(0)))
    return tree, lambda tree: nnx.merge(graph, tree)(X)


def _linen(dtype: Any, cast: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], Any]]:
    model = Dense(dtype)
    return model.init(jax.random.key(0), X), lambda tree: model.apply(cast(tree), X)


def _equinox() -> tuple[Any, Callable[[Any], Any]]:
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    tree, static = eqx.partition(model, eqx.is_array)
    return tree, lambda tree: jax.vmap(_cast(eqx.combine(tree, static)))(X)


#: Name -> the parameters, and a model of them.
MODELS: dict[str, Callable[[], tuple[Any, Callable[[Any], Any]]]] = {
    "nnx bfloat16": lambda: _nnx(Mixed),
    "nnx transposed": lambda: _nnx(Turned),
    "linen bfloat16": lambda: _linen(BF16, lambda tree: tree),
    "linen cast in the loss": lambda: _linen(None, _cast),
    "equinox cast in the loss": _equinox,
}


def without_ties(leaf: Any) -> Any:
    """Return weights of which no two have one absolute value, also in bfloat16."""
    count = leaf.size
    numbers = np.random.RandomState(count).permutation(count) - count / 2 + 0.25
    return jnp.asarray(numbers.reshape(leaf.shape) / 32, leaf.dtype)


def masked(leaf: Any) -> Any:
    """Return a matrix with the smaller half of its weights at zero."""
    if leaf.ndim < 2:
        return leaf
    values = np.asarray(leaf)
    order = np.argsort(np.abs(values), axis=None, kind="stable")
    mask = np.ones(values.size, values.dtype)
    mask[order[: values.size // 2]] = 0
    return jnp.asarray(values * mask.reshape(values.shape))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "how",
    ["eager", pytest.param("jit", marks=SLOW), pytest.param("grad", marks=SLOW), "jit(grad)"],
)
@pytest.mark.parametrize("name", MODELS)
def test_they_are_pruned_as_written_by_hand(name: str, how: str) -> None:
    tree, model = MODELS[name]()
    tree = jax.tree.map(without_ties, tree)

    def loss(tree: Any) -> Any:
        return (model(tree).astype(jnp.float32) ** 2).sum()

    run = {
        "eager": loss,
        "jit": jax.jit(loss),
        "grad": lambda tree: jax.value_and_grad(loss)(tree)[0],
        "jit(grad)": lambda tree: jax.jit(jax.value_and_grad(loss))(tree)[0],
    }[how]
    plain, expected = run(tree), run(jax.tree.map(masked, tree))
    with amanda.apply(tool := Prune(sparsity=0.5)):
        found = run(tree)
    assert not np.allclose(plain, expected, rtol=1e-2)
    assert np.allclose(found, expected, rtol=1e-5)
    assert "100.0% of the parameters reached" in str(tool.result().table())


def test_the_value_of_a_copy_in_another_dtype_is_known_where_it_is_traced() -> None:
    values: list[Any] = []

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "matmul":
            values.append(context.value(1))

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    weight = jnp.arange(6.0).reshape(2, 3) / 7
    with amanda.apply(tool):
        jax.jit(lambda w, x: x @ w.T.astype(BF16).astype(jnp.float32))(weight, X[:, :3])
    (value,) = values
    assert np.array_equal(value, np.asarray(weight).T.astype(BF16).astype("f"))


def test_copies_keep_no_array_alive() -> None:
    gc.collect()
    before = len(arrays._COPIES)
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda *_: None, observe=True))
    with amanda.apply(tool):
        value = jnp.ones((3, 4)) * 2
        copy = value.astype(BF16)
        alive = weakref.ref(value)
        assert arrays.origin(copy)[0] is value
        del value
        assert alive() is None
        assert arrays.origin(copy)[0] is copy
        del copy
    assert len(arrays._COPIES) <= before


@pytest.mark.parametrize("around", [lambda run: run, jax.jit], ids=["eager", "jit"])
def test_each_weight_of_a_loop_has_a_mask(around: Callable[[Any], Any]) -> None:
    generator = np.random.default_rng(0)
    tree = {name: jnp.asarray(generator.normal(size=(4, 4)), jnp.float32) for name in ("a", "b")}

    def program(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for name in ("a", "b"):
            x = x @ parameters[name]
        return x

    def pruned(values: jax.Array) -> Any:
        array = np.asarray(values)
        return np.where(np.abs(array) <= np.sort(np.abs(array).ravel())[7], 0, array)

    x, tool = jnp.ones((2, 4)), Prune(0.5)
    expected = program({name: jnp.asarray(pruned(value)) for name, value in tree.items()}, x)
    with amanda.apply(tool):
        found = around(program)(tree, x)
    assert np.allclose(found, expected, atol=1e-5)
    result = tool.result()
    assert ([one.name for one in result.weights], result.reached) == (["a", "b"], 32)
    assert result.notes == []


def test_pruning_says_that_iterations_of_a_loop_share_a_mask() -> None:
    weights = [jnp.arange(16.0).reshape(4, 4) - n for n in (3, 5)]
    tool = Prune(0.5)
    with amanda.apply(tool):
        x = jnp.ones((2, 4))
        for weight in weights:  # No function gets them, so they have no names.
            x = x @ weight
    result = tool.result()
    # The operator of the loop has one mask, and its result claims no more than that.
    assert ([one.name for one in result.weights], result.reached) == ([""], 0)
    assert ["iterations of a loop share it" in note for note in result.notes] == [True]


@pytest.mark.parametrize("how", ["eager", "jit", pytest.param("jit(grad)", marks=SLOW)])
def test_weights_that_are_merged_are_named_where_their_sum_is_read(how: str) -> None:
    """Name the product that reads `w + a @ b`, but not one that reads an activation."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = {"w": (8, 8), "a": (8, 2), "b": (2, 8), "o": (8, 4)}
    tree = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}

    def loss(tree: Any, x: Any) -> Any:
        merged = tree["w"] + 0.5 * tree["a"] @ tree["b"]
        return (jnp.tanh(x @ merged) @ tree["o"]).sum()

    run = {"eager": loss, "jit": jax.jit(loss), "jit(grad)": jax.jit(jax.grad(loss))}[how]
    with amanda.apply(tool := Quantize()):
        run(tree, jax.random.normal(next(keys), (3, 8)))
    unreached = {weight.name: weight.reason for weight in tool.result().unreached}
    assert unreached == {
        "a": "read by multiply; matmul#2 reads what is computed from it",
        "w": "read by add; matmul#2 reads what is computed from it",
    }
