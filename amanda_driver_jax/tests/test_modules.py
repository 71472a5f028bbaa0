"""Models of Flax and Equinox: scopes, names of parameters, and training with the pruning tool."""

# mypy: allow-untyped-decorators, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amanda
from amanda_tools.prune import Prune

X = jax.random.normal(jax.random.key(1), (8, 6, 6, 3))
Y = jnp.arange(8) % 4
SPARSITY = 0.5
STEPS = 20


class Net(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.layers = nnx.List([nnx.Linear(144, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])

    def __call__(self, x: Any) -> Any:
        x = jax.nn.relu(self.conv(x)).reshape(x.shape[0], -1)
        first, last = self.layers
        return last(jax.nn.relu(first(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Conv(4, (3, 3), name="conv")(x)).reshape(x.shape[0], -1)
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


class Batched(eqx.Module):
    """A network of batches. A mapped one adds gradients in another order."""

    weights: list[Any]

    def __call__(self, x: Any) -> Any:
        x = x.reshape(x.shape[0], -1)
        for weight in self.weights[:-1]:
            x = jax.nn.relu(x @ weight)
        return x @ self.weights[-1]


class EquinoxNet(eqx.Module):
    first: Any
    rest: list[Any]

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(108, 8, key=keys[0])
        self.rest = [eqx.nn.Linear(8, 4, key=keys[1])]

    def __call__(self, x: Any) -> Any:
        return self.rest[0](jax.nn.relu(self.first(x.ravel())))


def loss_of(logits: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()


def seen(run: Callable[[], Any], common_type: str) -> list[tuple[str, str, list[str]]]:
    """Return the names, modules and weights of the operators of a type."""
    found = []

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == common_type:
            weights = [weight.key for weight in context.weights.values()]
            found.append((context.name, context.module_path, weights))

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        run()
    return found


def by_name(run: Callable[[], Any], common_type: str) -> dict[str, tuple[str, list[str]]]:
    return {name: (path, weights) for name, path, weights in seen(run, common_type)}


NNX = {
    "layers.0/dot_general": ("layers.0", ["Net:layers.0.kernel"]),
    "layers.1/dot_general": ("layers.1", ["Net:layers.1.kernel"]),
}


@pytest.mark.parametrize("how", ["eager", "jit", "grad", "jit(grad)"])
def test_names_of_nnx(how: str) -> None:
    model = Net(nnx.Rngs(0))
    call: Callable[..., Any] = lambda model, x: model(x)  # noqa: E731
    total: Callable[..., Any] = lambda model, x: model(x).sum()  # noqa: E731
    run = {
        "eager": call,
        "jit": nnx.jit(call),
        "grad": nnx.grad(total),
        "jit(grad)": nnx.jit(nnx.grad(total)),
    }[how]
    assert by_name(lambda: run(model, X), "matmul") == NNX
    ((path, weights),) = by_name(lambda: run(model, X), "conv2d").values()
    assert (path, weights) == ("conv", ["Net:conv.kernel"])


class Wide(nnx.Module):
    """Layers whose operators share lines: in loops, in comprehensions, behind wrappers of JAX."""

    def __init__(self, rngs: Any) -> None:
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = jax.nn.gelu(self.norm(x), approximate=False)
        for layer in self.layers:
            x = sum([jnp.sin(layer(x)) for _ in range(2)])
        return self.attention(x[None])


@pytest.mark.parametrize("kind", ["module", "function"])
def test_eager_ops_are_those_of_jit_one_for_each_equation(kind: str) -> None:
    model, x = Wide(nnx.Rngs(0)), jnp.ones((3, 4))
    values = jnp.ones((1, 3, 2, 2))

    def function(x: Any) -> Any:
        attended = jax.nn.dot_product_attention(values, values, values)
        return jax.nn.gelu(x, approximate=False).sum() + attended.sum()

    run = function if kind == "function" else lambda x: model(x)
    found = []
    for call in (run, jax.jit(run), run):
        contexts: list[amanda.OpContext] = []
        tool = amanda.Tool()
        tool.add_inst_for_op(contexts.append)
        with amanda.apply(tool):
            call(x)
        found.append([(context.name, context.op_type) for context in contexts])
        assert len({context.get_op_id() for context in contexts}) == len(contexts) > 12
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("how", ["eager", "jit", "grad", "jit(grad)"])
def test_names_of_linen(how: str) -> None:
    model = LinenNet()
    params = model.init(jax.random.key(0), X)
    total: Callable[..., Any] = lambda params: model.apply(params, X).sum()  # noqa: E731
    run = {
        "eager": total,
        "jit": jax.jit(total),
        "grad": jax.grad(total),
        "jit(grad)": jax.jit(jax.grad(total)),
    }[how]
    assert by_name(lambda: run(params), "matmul") == {
        "Dense_0/dot_general": ("Dense_0", ["LinenNet:Dense_0.kernel"]),
        "Dense_1/dot_general": ("Dense_1", ["LinenNet:Dense_1.kernel"]),
    }


@pytest.mark.parametrize("how", ["eager", "jit", "grad", "jit(grad)"])
def test_names_of_equinox(how: str) -> None:
    model = EquinoxNet(jax.random.key(0))
    total: Callable[..., Any] = lambda model, x: jax.vmap(model)(x).sum()  # noqa: E731
    run = {
        "eager": total,
        "jit": eqx.filter_jit(total),
        "grad": eqx.filter_grad(total),
        "jit(grad)": eqx.filter_jit(eqx.filter_grad(total)),
    }[how]
    assert by_name(lambda: run(model, X), "matmul") == {
        "first/matmul": ("first", ["EquinoxNet:first.weight"]),
        "rest.0/matmul": ("rest.0", ["EquinoxNet:rest.0.weight"]),
    }


class NotATree(nnx.Module, pytree=False):  # type: ignore[call-arg]
    def __init__(self, rngs: Any) -> None:
        self.inner = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.inner(x)


class Cyclic(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.inner = nnx.Linear(3, 2, rngs=rngs)
        self.own = self

    def __call__(self, x: Any) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("kind", [NotATree, Cyclic])
def test_modules_that_are_no_trees(kind: Any) -> None:
    model = kind(nnx.Rngs(0))
    found = by_name(lambda: model(jnp.ones((1, 3))), "matmul")
    assert found == {"inner/dot_general": ("inner", [f"{kind.__name__}:inner.kernel"])}


def test_two_models_of_one_class_have_names_of_their_own() -> None:
    small = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    large = eqx.nn.MLP(3, 2, 5, 1, key=jax.random.key(0))
    x = jnp.ones(3)
    found = seen(lambda: [small(x), large(x)], "matmul")
    names = [name for *_, weights in found for name in weights]
    assert [name.partition(":")[0] for name in names] == ["MLP", "MLP", "MLP#2", "MLP#2"]


# Training.


@pytest.mark.parametrize("kind", ["nnx", "linen", "equinox"])
def test_where_a_model_is_called_does_not_matter(kind: str) -> None:
    linen = LinenNet()
    model: Any = {
        "nnx": lambda: Net(nnx.Rngs(0)),
        "linen": lambda: linen.bind(linen.init(jax.random.key(0), X)),  # type: ignore[no-untyped-call]
        "equinox": lambda: Batched([jnp.ones((108, 4)), jnp.ones((4, 4))]),
    }[kind]()
    seen: list[set[int]] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: c.insert_after_op(lambda *_, id: seen[-1].add(id), observe=True, id=c.get_op_id())
    )

    def evaluate() -> None:
        seen.append(set())
        model(X)

    with amanda.apply(tool):
        seen.append(set())
        model(X)
        evaluate()
    assert seen[0] == seen[1]
    assert len(seen[0]) > 3


def mask_of(weight: Any) -> Any:
    """Return the mask of the smallest half, of equal magnitudes the first ones."""
    layout = "HWIO" if weight.ndim == 4 else "IO"
    axes = [layout.index(axis) for axis in "OIHW" if axis in layout]
    canonical = np.asarray(weight).transpose(axes)
    mask = np.ones(canonical.size, np.float32)
    order = np.argsort(np.abs(canonical).ravel(), kind="stable")
    mask[order[: round(SPARSITY * mask.size)]] = 0
    return jnp.asarray(mask.reshape(canonical.shape).transpose(np.argsort(axes)))


def _masked(weight: Any, mask: Any) -> Any:
    return weight * mask


#: The product, whose gradient goes straight through to the weight.
masked = jax.custom_jvp(_masked)
masked.defjvp(lambda primals, tangents: (masked(*primals), tangents[0]))


def masks_of(tree: Any, transposed: bool = False) -> Any:
    def mask(weight: Any) -> Any:
        if not isinstance(weight, jax.Array) or weight.ndim < 2:
            return None
        return mask_of(weight.T).T if transposed else mask_of(weight)

    return jax.tree.map(mask, tree)


def apply_masks(tree: Any, masks: Any, function: Callable[..., Any]) -> Any:
    return jax.tree.map(
        lambda mask, leaf: leaf if mask is None else function(leaf, mask),
        masks,
        tree,
        is_leaf=lambda leaf: leaf is None,
    )


def train(tree: Any, loss: Callable[[Any], Any], jitted: bool, masks: Any = None) -> Any:
    optimizer = optax.adam(1e-2)

    def pruned(tree: Any) -> Any:
        return loss(tree if masks is None else apply_masks(tree, masks, masked))

    def step(tree: Any, state: Any) -> Any:
        gradients = jax.grad(pruned)(tree)
        if masks is not None:
            gradients = apply_masks(gradients, masks, _masked)
        updates, state = optimizer.update(gradients, state, tree)
        return optax.apply_updates(tree, updates), state

    run = jax.jit(step) if jitted else step
    state = optimizer.init(tree)
    for _ in range(STEPS):
        tree, state = run(tree, state)
    return tree


def of_nnx() -> tuple[Any, Callable[[Any], Any], bool]:
    definition, tree = nnx.split(Net(nnx.Rngs(0)))
    return tree, lambda tree: loss_of(nnx.merge(definition, tree)(X)), False


def of_equinox() -> tuple[Any, Callable[[Any], Any], bool]:
    keys = jax.random.split(jax.random.key(0))
    shapes = [(108, 8), (8, 4)]
    weights = [jax.random.normal(key, s) / 9 for key, s in zip(keys, shapes, strict=True)]
    return Batched(weights), lambda model: loss_of(model(X)), False


def of_mapped_equinox() -> tuple[Any, Callable[[Any], Any], bool]:
    tree, static = eqx.partition(EquinoxNet(jax.random.key(0)), eqx.is_array)
    return tree, lambda tree: loss_of(jax.vmap(eqx.combine(tree, static))(X)), True


MODELS: Mapping[str, Callable[[], tuple[Any, Callable[[Any], Any], bool]]] = {
    "nnx": of_nnx,
    "equinox": of_equinox,
    "mapped equinox": of_mapped_equinox,
}


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("model", MODELS)
def test_training_with_the_pruning_tool_is_training_with_masks(model: str, jitted: bool) -> None:
    tree, loss, transposed = MODELS[model]()
    # In Equinox a weight is (out, in).
    expected = train(tree, loss, jitted, masks_of(tree, transposed))
    tool = Prune(SPARSITY)
    with amanda.apply(tool):
        found = train(tree, loss, jitted)
    assert len(tool.result().weights) == (3 if model == "nnx" else 2)
    plain = train(tree, loss, jitted)
    triples = zip(*map(jax.tree.leaves, (found, expected, plain)), strict=True)
    for one, other, vanilla in triples:
        if jitted or transposed:
            # Fusion changes the last bits, and so does the order in which a map adds gradients; the
            # steps add that up.
            scale = float(jnp.abs(other).max())
            assert float(jnp.abs(one - other).max()) <= 1e-6 * STEPS * scale
        else:
            assert np.array_equal(one, other)
        assert not np.array_equal(one, vanilla)


class Renamed(nnx.Module):
    """Its methods do not name their object `self`."""

    def __init__(module, rngs: Any) -> None:
        module.inner = nnx.Linear(3, 2, rngs=rngs)

    def __call__(module, x: Any) -> Any:
        return jnp.tanh(x @ module.inner.kernel[...])


def test_modules_are_known_whatever_their_methods_call_them() -> None:
    model = Renamed(nnx.Rngs(0))
    (found,) = seen(lambda: model(jnp.ones((4, 3))), "matmul")
    assert found[2] == ["Renamed:inner.kernel"]
