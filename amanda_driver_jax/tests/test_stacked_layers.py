"""A model whose layers are stacked is instrumented as the same model that is written as a loop."""

# mypy: allow-untyped-decorators, allow-subclassing-any

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

import amanda
from amanda_driver_jax import jax_internals as internals
from amanda_tools.flops import Flops
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize
from amanda_tools.sensitivity import Sensitivity

LAYERS, WIDTH, WORDS = 3, 8, 11
BF16 = jnp.bfloat16
TOKENS = jnp.arange(10).reshape(2, 5) % WORDS


class Block(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        y = nn.LayerNorm(dtype=self.dtype)(x)
        q, k, v = (nn.Dense(WIDTH, dtype=self.dtype, name=name)(y) for name in "qkv")
        found = nn.dot_product_attention(*(value[:, :, None] for value in (q, k, v)))
        x = x + nn.Dense(WIDTH, dtype=self.dtype, name="o")(found[:, :, 0])
        y = nn.gelu(nn.Dense(2 * WIDTH, dtype=self.dtype, name="up")(x))
        return x + nn.Dense(WIDTH, dtype=self.dtype, name="down")(y), None


class Model(nn.Module):
    """A language model."""

    is_scanned: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(WORDS, WIDTH, dtype=self.dtype, name="embed")(tokens)
        if self.is_scanned:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            layers: Any = nn.scan(nn.remat(Block), **axes, length=LAYERS)
            x, _ = layers(self.dtype, name="layers")(x, None)
        else:
            for layer in range(LAYERS):
                x, _ = Block(self.dtype, name=f"layer{layer}")(x)
        return nn.Dense(WORDS, dtype=self.dtype, name="head")(x)


def unstacked(tree: Any) -> Any:
    """Return the parameters of the loop, given those of the scanned model."""
    params = dict(tree["params"])
    layers = params.pop("layers")
    for layer in range(LAYERS):
        params[f"layer{layer}"] = jax.tree.map(lambda leaf, n=layer: leaf[n], layers)
    return {"params": params}


@pytest.fixture(scope="module")
def models() -> list[tuple[Model, Any]]:
    """Return both models, with numbers that bfloat16 has, of which no two are as large."""
    scanned, loop = Model(True, BF16), Model()
    tree = scanned.init(jax.random.key(0), TOKENS)

    def numbers(leaf: Any) -> Any:
        order = np.random.RandomState(leaf.size).permutation(leaf.size)
        signs = np.where(order % 2, 1.0, -1.0)
        return jnp.asarray((signs * (128 + order % 128) / 128 / 4).reshape(leaf.shape), BF16)

    tree = jax.tree.map(lambda leaf: numbers(leaf).astype(jnp.float32), tree)
    return [(scanned, tree), (loop, unstacked(tree))]


def run_both(models: Any, make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return a tool that was applied to the scanned model, and one that was to the loop."""
    tools = []
    for model, tree in models:
        with amanda.apply(tool := make()):
            jax.jit(model.apply)(tree, TOKENS).block_until_ready()
        tools.append(tool)
    scanned, loop = tools
    return scanned, loop


def by_layer(found: dict[str, Any]) -> dict[str, Any]:
    """Return values of stacks as those of the loop's parameters."""
    values = {}
    for name, value in found.items():
        _, is_stacked, path = name.partition("layers.")
        layers = {f"layer{n}.{path}": n for n in range(LAYERS)} if is_stacked else {name: ...}
        values.update({key: np.asarray(value)[n] for key, n in layers.items()})
    return values


def test_masks_are_those_of_the_loop(models: Any) -> None:
    scanned, loop = run_both(models, lambda: Prune(sparsity=0.5))
    expected = {name: np.asarray(mask) for name, mask in loop.masks.saved().items()}
    found = by_layer(scanned.masks.saved())
    assert found.keys() == expected.keys()
    assert len(expected) == 6 * LAYERS + 1
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    results = [tool.result() for tool in (scanned, loop)]
    assert len({(one.parameters, one.reached) for one in results}) == 1
    assert [one.name for one in results[0].unreached] == ["embed.embedding"]


def test_the_scanned_model_computes_with_the_masks(models: Any) -> None:
    (model, tree), _ = models
    with amanda.apply(tool := Prune(sparsity=0.5)):
        found = jax.jit(model.apply)(tree, TOKENS)
    masks = tool.masks.saved()

    def masked(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
        return leaf * masks.get(name, 1)

    expected = jax.jit(model.apply)(jax.tree_util.tree_map_with_path(masked, tree), TOKENS)
    plain = jax.jit(model.apply)(tree, TOKENS)
    assert not np.allclose(plain, expected, rtol=0.1)
    # The scan and the loop are compiled as different programs, which round differently.
    assert np.allclose(np.asarray(found, "f"), np.asarray(expected, "f"), rtol=0.05, atol=0.05)


def test_scales_of_channels_are_those_of_the_loop(models: Any) -> None:
    def make() -> Any:
        return Quantize("dynamic", weights="int4", activations="none", per="channel")

    scanned, loop = (tool.result() for tool in run_both(models, make))
    stacked = {
        row.name: np.asarray(row.scales).reshape(row.scales_shape) for row in scanned.weights
    }
    expected = {row.name: np.asarray(row.scales).ravel() for row in loop.weights}
    found = by_layer(stacked)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].ravel(), expected[name]) for name in found)


def total(result: Any) -> int:
    return sum(row.macs for row in result.ops)


def test_products_are_those_of_the_loop(models: Any) -> None:
    scanned, loop = (tool.result() for tool in run_both(models, Flops))
    batch, length = TOKENS.shape
    products = LAYERS * (8 * WIDTH * WIDTH + 2 * length * WIDTH) + WORDS * WIDTH
    assert total(scanned) == total(loop) == batch * length * products


def test_each_layer_is_as_sensitive_as_in_the_loop(models: Any) -> None:
    scanned, loop = (tool.result() for tool in run_both(models, lambda: Sensitivity("int8")))
    assert len(scanned.ops) == len(loop.ops)
    found = {weight: op.sqnr for op in scanned.ops for weight in op.weights}
    expected = {weight: op.sqnr for op in loop.ops for weight in op.weights}
    sizes = [sorted(n for op in one.ops for n in op.weights.values()) for one in (scanned, loop)]
    assert sizes[0] == sizes[1]
    assert len(expected) == 6 * LAYERS + 1
    for weight, noise in found.items():
        name, is_part, layer = weight.partition("[")
        same = name.replace("layers.", f"layer{layer[:-1]}.") if is_part else name
        # Activations are rounded to bfloat16.
        assert noise == pytest.approx(expected[same], abs=2)


# Each way of writing layers, against the parameters with the masks multiplied in by hand.

X = jax.random.normal(jax.random.key(1), (2, WIDTH))


def _layer(x: Any, layer: Any) -> tuple[Any, None]:
    return jax.nn.relu(x @ layer["w"] + layer["b"]), None


def _scanned(params: Any, x: Any, **options: Any) -> Any:
    return jax.lax.scan(_layer, x, params["layers"], **options)[0] @ params["out"]


def _recomputed(params: Any, x: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(_layer), x, params["layers"])[0] @ params["out"]


def _cast(params: Any, x: Any) -> Any:
    cast = jax.tree.map(lambda leaf: leaf.astype(BF16), params)
    return _scanned(cast, x.astype(BF16)).astype(jnp.float32)


def _indexed(params: Any, x: Any) -> Any:
    for number in range(LAYERS):
        x, _ = _layer(x, jax.tree.map(lambda leaf, n=number: leaf[n], params["layers"]))
    return x @ params["out"]


@jax.jit
def _jitted(x: Any, layer: Any) -> Any:
    return _layer(x, layer)[0]


def _calls(params: Any, x: Any) -> Any:
    for number in range(LAYERS):
        x = _jitted(x, jax.tree.map(lambda leaf, n=number: leaf[n], params["layers"]))
    return x @ params["out"]


class Linear(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.linear(x))


def _nnx() -> tuple[Any, Callable[[Any, Any], Any]]:
    make = nnx.vmap(Linear, in_axes=(0,), out_axes=0)
    graph, tree = nnx.split(nnx.split_rngs(splits=LAYERS)(make)(nnx.Rngs(0)))
    scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(lambda x, layer: layer(x))
    return tree, lambda tree, x: scan(x, nnx.merge(graph, tree))


class Stack(eqx.Module):
    layers: Any

    def __call__(self, x: Any) -> Any:
        arrays, rest = eqx.partition(self.layers, eqx.is_array)

        def body(x: Any, layer: Any) -> tuple[Any, None]:
            return jax.nn.relu(eqx.combine(layer, rest)(x)), None

        return jax.lax.scan(body, x, arrays)[0]


def _equinox() -> tuple[Any, Callable[[Any, Any], Any]]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(keys)
    arrays, rest = eqx.partition(Stack(layers), eqx.is_array)
    return arrays, lambda tree, x: eqx.combine(tree, rest)(x[0])


def _plain(model: Callable[[Any, Any], Any]) -> Callable[[], tuple[Any, Callable[[Any, Any], Any]]]:
    layers = {"w": jnp.ones((LAYERS, WIDTH, WIDTH)), "b": jnp.ones((LAYERS, WIDTH))}
    return lambda: ({"layers": layers, "out": jnp.ones((WIDTH, 2))}, model)


WAYS = {
    "scan": _plain(_scanned),
    "backwards": _plain(lambda params, x: _scanned(params, x, reverse=True)),
    "checkpoint": _plain(_recomputed),
    "cast": _plain(_cast),
    "indexed": _plain(_indexed),
    "calls of a jitted function": _plain(_calls),
    "nnx": _nnx,
    "equinox": _equinox,
}


def distinct(leaf: Any) -> Any:
    """Return numbers of which no two have one absolute value, also in bfloat16."""
    numbers = np.random.RandomState(leaf.size).permutation(leaf.size) - leaf.size / 2 + 0.25
    return jnp.asarray(numbers.reshape(leaf.shape) / 256, leaf.dtype)


def halved(leaf: Any) -> Any:
    """Return matrices with the smaller half of each one's weights at zero."""
    if leaf.shape in ((LAYERS, WIDTH), (WIDTH,)):
        return leaf
    matrices = np.array(leaf).reshape(-1, leaf.shape[-2] * leaf.shape[-1])
    order = np.argsort(np.abs(matrices), axis=1)
    np.put_along_axis(matrices, order[:, : matrices.shape[1] // 2], 0, 1)
    return jnp.asarray(matrices.reshape(leaf.shape))


@pytest.mark.parametrize("how", ["jit", "jit(grad)", pytest.param("grad", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_each_layer_is_pruned_as_by_hand(way: str, how: str) -> None:
    tree, model = WAYS[way]()
    tree = jax.tree.map(distinct, tree)

    def loss(tree: Any) -> Any:
        return (model(tree, X) ** 2).sum()

    grad = jax.value_and_grad(loss)
    run = {"jit": jax.jit(lambda t: (loss(t), None)), "grad": grad, "jit(grad)": jax.jit(grad)}[how]
    plain, expected = run(tree)[0], run(jax.tree.map(halved, tree))[0]
    with amanda.apply(tool := Prune(sparsity=0.5)):
        found = run(tree)[0]
    assert not np.allclose(plain, expected, rtol=1e-2)
    assert np.allclose(found, expected, rtol=2e-2 if way == "cast" else 1e-5)
    assert "; 100.0% of the parameters reached" in str(tool.result().table())


def test_weights_that_are_mapped_are_named_with_the_reason() -> None:
    tree, _ = WAYS["scan"]()

    def ensemble(params: Any, x: Any) -> Any:
        # A function whose axis has a name may communicate along it, so it stays mapped.
        return jax.vmap(lambda layer: _layer(x, layer)[0], axis_name="members")(params["layers"])

    with amanda.apply(tool := Prune(sparsity=0.5)):
        found = jax.jit(ensemble)(tree, X)
    assert np.array_equal(found, jax.jit(ensemble)(tree, X))
    reasons = {one.name: one.reason for one in tool.result().unreached}
    assert reasons["layers.w"] == "read by matmul as a part that has no indices"
    assert tool.result().reached == 0


def test_scan_is_restored() -> None:
    before = internals.SCAN.cell_contents
    with amanda.apply(amanda.Tool()):
        assert internals.SCAN.cell_contents is not before
    assert internals.SCAN.cell_contents is before
