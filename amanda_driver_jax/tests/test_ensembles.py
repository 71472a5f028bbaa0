"""Members of an ensemble, layers of a scan and frozen weights are weights of their own."""

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
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

MEMBERS = 3
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, MEMBERS)
X = jax.random.normal(jax.random.key(1), (5, 4))

Forward = Callable[[Any], Any]


def _weights(key: Any) -> dict[str, Any]:
    return {"a": jax.random.normal(key, (4, 8)), "b": jax.random.normal(key, (8, 2))}


def _member(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["a"]) @ params["b"]


def _plain() -> tuple[Any, Forward]:
    return jax.vmap(_weights)(KEYS), lambda params: jax.vmap(_member, (0, None))(params, X)


def _other_axis() -> tuple[Any, Forward]:
    params = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, -1), _plain()[0])
    return params, lambda params: jax.vmap(_member, (-1, None), 1)(params, X)


class _Member(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2, use_bias=False)(jnp.tanh(nn.Dense(8, use_bias=False)(x)))


def _linen() -> tuple[Any, Forward]:
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    model = nn.vmap(_Member, in_axes=None, axis_size=MEMBERS, **axes)()
    return model.init(KEY, X), lambda tree: model.apply(tree, X)


def _nnx() -> tuple[Any, Forward]:
    @nnx.split_rngs(splits=MEMBERS)
    @nnx.vmap
    def make(rngs: Any) -> Any:
        sizes = {"use_bias": False, "rngs": rngs}
        return nnx.Sequential(nnx.Linear(4, 8, **sizes), jnp.tanh, nnx.Linear(8, 2, **sizes))

    graph, tree = nnx.split(make(nnx.Rngs(0)))
    run = nnx.vmap(lambda member, x: member(x), in_axes=(0, None))
    return tree, lambda tree: run(nnx.merge(graph, tree), X)


def _equinox() -> tuple[Any, Forward]:
    make = eqx.filter_vmap(
        lambda key: eqx.nn.MLP(4, 2, 8, 1, use_bias=False, use_final_bias=False, key=key)
    )
    tree, static = eqx.partition(make(KEYS), eqx.is_array)
    run = eqx.filter_vmap(lambda member, x: jax.vmap(member)(x), in_axes=(eqx.if_array(0), None))
    return tree, lambda tree: run(eqx.combine(tree, static), X)


ENSEMBLES: dict[str, Callable[[], tuple[Any, Forward]]] = {
    "dict": _plain,
    "other axis": _other_axis,
    "linen": _linen,
    "nnx": _nnx,
    "equinox": _equinox,
}
SLOW = pytest.mark.slow


def masked(leaf: Any, axis: int) -> Any:
    """Return the weights of all members, with the smaller half of each at zero."""

    def half(member: Any) -> Any:
        order = np.argsort(np.abs(member), axis=None, kind="stable")
        mask = np.ones(member.size, member.dtype)
        mask[order[: member.size // 2]] = 0
        return member * mask.reshape(member.shape)

    members = np.moveaxis(np.asarray(leaf), axis, 0)
    return jnp.asarray(np.moveaxis(np.stack([*map(half, members)]), 0, axis))


@pytest.mark.parametrize(
    "how", ["jit(grad)", *(pytest.param(h, marks=SLOW) for h in ("eager", "jit"))]
)
@pytest.mark.parametrize("name", ENSEMBLES)
def test_each_member_is_pruned_by_itself(name: str, how: str) -> None:
    tree, run = ENSEMBLES[name]()
    axis = -1 if name == "other axis" else 0

    def loss(tree: Any) -> Any:
        return (run(tree) ** 2).sum()

    def computed(tree: Any) -> Any:
        if how == "jit(grad)":
            return jax.jit(jax.value_and_grad(loss))(tree)
        return (jax.jit(run) if how == "jit" else run)(tree)

    value, gradients = (computed(jax.tree.map(lambda leaf: masked(leaf, axis), tree)), None)
    if how == "jit(grad)":
        value, gradients = value
    with amanda.apply(tool := Prune(sparsity=0.5)):
        found = computed(tree)
    result = tool.result()
    assert result.reached == result.parameters == sum(leaf.size for leaf in jax.tree.leaves(tree))
    if gradients is None:
        assert np.allclose(found, value, atol=1e-5)
        return
    assert np.allclose(found[0], value, rtol=1e-5)
    # Of the weights that are left; the mask passes no gradient to the others.
    for one, other, leaf in zip(*map(jax.tree.leaves, (found[1], gradients, tree)), strict=True):
        left = np.asarray(masked(leaf, axis)) != 0
        assert np.allclose(np.asarray(one)[left], np.asarray(other)[left], atol=1e-4)


def test_members_that_are_differentiated_by_themselves_have_ops_of_their_own() -> None:
    params = jax.vmap(_weights)(KEYS)
    run = jax.jit(jax.vmap(jax.grad(lambda params: _member(params, X).sum())))
    with amanda.apply(tool := Quantize("dynamic", weights="int4", activations="none")):
        run(params)
    result = tool.result()
    assert result.reached == result.parameters == sum(map(jnp.size, params.values()))


def test_jitted_functions_are_mapped_as_their_members() -> None:
    params = jax.vmap(_weights)(KEYS)
    expected = jax.vmap(_member, (0, None))(jax.tree.map(lambda leaf: masked(leaf, 0), params), X)
    with amanda.apply(Prune(sparsity=0.5)):
        found = jax.vmap(jax.jit(_member), (0, None))(params, X)
    assert np.allclose(found, expected, atol=1e-5)


def test_examples_stay_one_program() -> None:
    def ops(run: Callable[[], Any]) -> int:
        seen: set[int] = set()
        tool = amanda.Tool()
        tool.add_inst_for_op(lambda context: seen.add(context.get_op_id()))
        with amanda.apply(tool):
            run()
        return len(seen)

    params = _weights(KEY)

    def mapped(count: int) -> list[int]:
        rows = X[:count]
        examples, batch = jax.vmap(_member, (None, 0)), {"x": rows, "y": rows}
        by_row = jax.vmap(lambda row: _member(params, row["x"]))
        return [ops(lambda: jax.jit(examples)(params, rows)), ops(lambda: jax.jit(by_row)(batch))]

    assert mapped(2) == mapped(5)


class _Dropping(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return nn.Dropout(0.4, deterministic=False)(nn.Dense(4)(x)), None


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "shared"])
@pytest.mark.parametrize("wrap", [lambda block: block, nn.remat], ids=["scan", "remat"])
def test_loops_draw_the_random_numbers_of_a_scan(
    wrap: Callable[[Any], Any], is_split: bool
) -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            rngs = {"params": True, "dropout": is_split}
            scan = nn.scan(wrap(_Dropping), {"params": 0}, split_rngs=rngs, length=MEMBERS)
            # What is drawn afterwards depends on how often the scan has drawn.
            return nn.Dropout(0.5, deterministic=False)(scan()(x, None)[0])

    tree = Net().init({"params": KEY, "dropout": KEY}, X)
    expected = Net().apply(tree, X, rngs={"dropout": KEY})
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda value: None))
    with amanda.apply(tool):
        found = Net().apply(tree, X, rngs={"dropout": KEY})
    assert np.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_edited_values_stay_weak(jitted: bool) -> None:
    def run(x: Any) -> Any:
        # A strong float32 would make the product one.
        return (jax.lax.sin(1.0) + 1) * x.astype(jnp.bfloat16), jax.lax.add(2, 3)

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda value: value + 0))
    expected = run(X)
    with amanda.apply(tool):
        found = (jax.jit(run) if jitted else run)(X)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)


ADAPTERS = {
    "down": jax.random.normal(KEYS[0], (4, 2)),
    "up": jax.random.normal(KEYS[1], (2, 8)),
}


@pytest.mark.parametrize("how", ["grad", "jit(grad)", "jit", "closure"])
def test_frozen_weights_are_named_beside_those_that_are_trained(how: str) -> None:
    base = _weights(KEY)

    def loss(adapters: Any, base: Any) -> Any:
        hidden = X @ base["a"] + (X @ adapters["down"]) @ adapters["up"]
        return (jnp.tanh(hidden) @ base["b"]).sum()

    runs = {
        "grad": lambda: jax.grad(loss)(ADAPTERS, base),
        "jit(grad)": lambda: jax.jit(jax.grad(loss))(ADAPTERS, base),
        "jit": lambda: jax.jit(loss)(ADAPTERS, base),
        "closure": lambda: jax.grad(lambda adapters: loss(adapters, base))(ADAPTERS),
    }
    with amanda.apply(tool := Quantize("dynamic", weights="int8", activations="none")):
        runs[how]()
    result = tool.result()
    assert {row.name.rpartition(":")[2] for row in result.weights} == {"a", "b", "down", "up"}
    assert result.reached == result.parameters == 4 * 8 + 8 * 2 + 4 * 2 + 2 * 8


def test_merged_weights_that_are_not_reached_are_named() -> None:
    base = _weights(KEY)

    def loss(adapters: Any, base: Any) -> Any:
        merged = base["a"] + adapters["down"] @ adapters["up"]
        return (jnp.tanh(X @ merged) @ base["b"]).sum()

    with amanda.apply(tool := Prune(sparsity=0.5)):
        jax.jit(jax.grad(loss))(ADAPTERS, base)
    result = tool.result()
    assert {one.name for one in result.unreached} == {"a", "down"}
    assert result.parameters - result.reached == 4 * 8 + 4 * 2


def test_batches_beside_parameters_are_data() -> None:
    params, given = _weights(KEY), {"x": X, "y": jnp.ones((5, 2))}

    def loss(params: Any, rest: Any) -> Any:
        return ((_member(params, rest["x"]) - rest["y"]) ** 2).mean()

    with amanda.apply(tool := Prune(sparsity=0.5)):
        jax.jit(jax.grad(loss))(params, given)
    result = tool.result()
    assert result.reached == result.parameters == 4 * 8 + 8 * 2
