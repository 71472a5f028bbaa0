"""Run programs on JAX as people write them, plain and under tools, and compare.

Each program runs under a tool that watches every op, one whose routines return None, all shipped
tools that look, and each one that edits. It must live, and compute what it computes alone. The
programs are small, and one stands for each library or transformation. `python -m
maintenance.sweeps.jax_programs` runs them in this environment; `--record` keeps the results.
Long, since it is a list of programs.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# To compile takes most of the time, and what is compiled runs once.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np

import amanda

from . import shipped
from .others.suites import commit

INTRODUCTION = """\
# Programs on JAX under tools

Each program stands for a library or a transformation, and runs as its users write it: plain, under
a tool that watches, under routines that return None, under all shipped tools that look (`tools`)
and under each one that edits, with options that keep the values. `equal` means that it ended and
computed the same each time. XLA compiles most of them at its lowest level of optimization. The
commits are those of the sources that ran.
`python -m maintenance.sweeps.jax_programs --record` writes this page in the environment of each
release; do not edit it.
"""
#: The results of each release of JAX, and the page that shows them.
RECORDS = Path(__file__).with_name("jax_results")
PAGE = Path(__file__).parents[2] / "docs" / "jax-programs.md"

KEY = jax.random.key(0)
X = np.random.RandomState(0).randn(8, 4).astype("float32")
Y = np.random.RandomState(1).randn(8, 2).astype("float32")


class Program(NamedTuple):
    """A program.

    Attributes:
        run: Runs it, and returns what it has computed.
        needs: Modules that must be installed.
        tolerance: How far numbers may differ, relative to the largest of an array: programs with
            tools are compiled otherwise, and some amplify how numbers are rounded.
    """

    run: Callable[[], Any]
    needs: tuple[str, ...] = ()
    tolerance: float = 1e-4


PROGRAMS: dict[str, Program] = {}


def program(
    name: str, *needs: str, tolerance: float = 1e-4
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a program."""

    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS[name] = Program(run, needs, tolerance)
        return run

    return add


def _mlp(key: Any = KEY) -> dict[str, Any]:
    one, two = jax.random.split(key)
    return {
        "a": {"w": jax.random.normal(one, (4, 8)) / 2, "b": jnp.zeros(8)},
        "out": jax.random.normal(two, (8, 2)) / 3,
    }


def _forward(params: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ params["a"]["w"] + params["a"]["b"]) @ params["out"]


def _loss(params: Any, x: Any, y: Any) -> Any:
    return ((_forward(params, x) - y) ** 2).mean()


# Libraries of layers.


@program("NNX, trained", "flax", "optax")
def _nnx() -> Any:
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.a, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.drop, self.b = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.b(self.drop(nnx.relu(self.norm(self.a(x)))))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda m: ((m(X) - Y) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    return [step(model, optimizer) for _ in range(2)], nnx.state(model, nnx.Param)


@program("NNX, scanned and recomputed layers", "flax", tolerance=3e-2)
def _nnx_scan() -> Any:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.linear = nnx.Linear(4, 4, rngs=rngs, dtype=jnp.bfloat16)

        @nnx.remat
        def __call__(self, x: Any) -> Any:
            return x + nnx.relu(self.linear(x)).astype(x.dtype)

    make = nnx.split_rngs(splits=3)(nnx.vmap(Block, in_axes=(0,), out_axes=0))
    blocks = make(nnx.Rngs(0))
    scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(lambda x, block: block(x))
    return nnx.jit(nnx.value_and_grad(lambda b: scan(jnp.asarray(X), b).sum()))(blocks)


@program("Linen, scanned and recomputed layers", "flax", tolerance=3e-2)
def _linen_scan() -> Any:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.SelfAttention(2, dtype=jnp.bfloat16)(nn.LayerNorm()(x))
            return x + nn.Dense(4, dtype=jnp.bfloat16)(y), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(nn.remat(Block), **axes, length=3)()(x, None)[0]

    x = jnp.asarray(X)[None]
    params = Net().init(KEY, x)
    loss = jax.value_and_grad(lambda p: Net().apply(p, x).astype("float32").sum())
    return jax.jit(loss)(params)


@program("Linen, batch normalization and dropout", "flax")
def _linen() -> Any:
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x))

    variables = Net().init(KEY, X, False)

    @jax.jit
    def step(variables: Any, key: Any) -> Any:
        options = {"rngs": {"dropout": key}, "mutable": ["batch_stats"]}
        found, state = Net().apply(variables, X, True, **options)
        return found, state

    return step(variables, KEY), Net().apply(variables, X, False)


@program("Equinox, filters", "equinox", "optax")
def _equinox() -> Any:
    import equinox as eqx
    import optax

    model = eqx.nn.MLP(4, 2, 8, 2, key=KEY)
    optimizer = optax.adamw(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        loss, gradients = eqx.filter_value_and_grad(lambda m: ((jax.vmap(m)(X) - Y) ** 2).mean())(
            model
        )
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    for _ in range(2):
        model, state, loss = step(model, state)
    return loss, eqx.filter(model, eqx.is_array)


@program("Equinox, scanned layers", "equinox")
def _equinox_scan() -> Any:
    import equinox as eqx

    keys = jax.random.split(KEY, 3)
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(keys)
    arrays, rest = eqx.partition(layers, eqx.is_array)

    @jax.jit
    def run(arrays: Any, x: Any) -> Any:
        def body(x: Any, layer: Any) -> Any:
            return jnp.tanh(jax.vmap(eqx.combine(layer, rest))(x)), x.sum()

        return jax.lax.scan(body, x, arrays)

    return run(arrays, X)


@program("Haiku, recurrent", "haiku")
def _haiku() -> Any:
    import haiku as hk

    def net(x: Any) -> Any:
        core = hk.LSTM(4)
        found, _ = hk.dynamic_unroll(core, x[:, None], core.initial_state(1))
        return hk.Linear(2)(found[:, 0])

    model = hk.without_apply_rng(hk.transform(net))
    params = model.init(KEY, X)
    return jax.jit(jax.value_and_grad(lambda p: ((model.apply(p, X) - Y) ** 2).mean()))(params)


@program("Keras, fit", "keras")
def _keras() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.LayerNormalization()]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])
    model.compile("adam", "mse")
    history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], model.predict(X, verbose=0)


@program("Penzai", "penzai")
def _penzai() -> Any:
    from penzai import pz
    from penzai.models import simple_mlp

    sizes = {"feature_sizes": [4, 8, 2], "activation_fn": jax.nn.relu}
    model = simple_mlp.MLP.from_config(name="mlp", init_base_rng=KEY, **sizes)
    slots, params = pz.unbind_params(model, freeze=True)

    def run(params: Any, x: Any) -> Any:
        bound = pz.bind_variables(slots, params)
        return bound(pz.nx.wrap(x).tag("rows", "features")).unwrap("rows", "features")

    return jax.jit(run)(params, X)


@program("parameters in a dict, mixed precision", tolerance=3e-2)
def _mixed() -> Any:
    params = {"layers": {"w": jax.random.normal(KEY, (3, 4, 4)) / 2, "b": jnp.zeros((3, 4))}}

    def loss(params: Any) -> Any:
        cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

        def body(x: Any, layer: Any) -> Any:
            return jax.nn.relu(x @ layer["w"] + layer["b"]), None

        x, _ = jax.lax.scan(jax.checkpoint(body), X.astype(jnp.bfloat16), cast["layers"])
        return x.astype("float32").sum()

    return jax.jit(jax.value_and_grad(loss))(params)


@program("low-rank adapters")
def _lora() -> Any:
    base = _mlp()
    lora = {"down": jax.random.normal(KEY, (4, 2)), "up": jnp.ones((2, 8)) / 9}

    def loss(lora: Any, base: Any) -> Any:
        merged = base | {"a": base["a"] | {"w": base["a"]["w"] + lora["down"] @ lora["up"]}}
        return _loss(merged, X, Y)

    return jax.jit(jax.value_and_grad(loss))(lora, base)


@program("an ensemble under vmap")
def _ensemble() -> Any:
    params = jax.vmap(_mlp)(jax.random.split(KEY, 3))
    grad = jax.vmap(jax.value_and_grad(_loss), (0, None, None))
    return jax.jit(grad)(params, X, Y), jax.jit(jax.vmap(partial(_forward, _mlp())))(X)


# Optimizers and solvers.


@program("Optax, losses and schedules", "optax")
def _optax() -> Any:
    import optax

    chain = (optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, 5)))
    optimizer = optax.MultiSteps(optax.chain(*chain), 2)
    params = _mlp()
    state = optimizer.init(params)

    def loss(params: Any) -> Any:
        logits = _forward(params, X)
        return optax.softmax_cross_entropy_with_integer_labels(logits, Y.argmax(1)).mean()

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(3):
        params, state, value = step(params, state)
    return params, value


@program("Optax, L-BFGS", "optax", tolerance=1e-2)
def _lbfgs() -> Any:
    import optax

    solver = optax.lbfgs()
    params = jnp.array([-1.0, 1.5])

    def function(p: Any) -> Any:
        return ((p - 1) ** 2).sum() + (p[0] * p[1]) ** 2 / 5

    state = solver.init(params)
    evaluate = optax.value_and_grad_from_state(function)
    for _ in range(4):
        value, gradient = evaluate(params, state=state)
        options = {"value": value, "grad": gradient, "value_fn": function}
        updates, state = solver.update(gradient, state, params, **options)
        params = optax.apply_updates(params, updates)
    return params


@program("NumPyro, SVI", "numpyro", tolerance=1e-3)
def _svi() -> Any:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    svi = SVI(
        _regression(numpyro, dist),
        AutoNormal(_regression(numpyro, dist)),
        numpyro.optim.Adam(1e-2),
        Trace_ELBO(),
    )
    found = svi.run(jax.random.PRNGKey(0), 5, X, Y[:, 0], progress_bar=False)
    return found.params, found.losses


@program("NumPyro, NUTS", "numpyro", tolerance=5e-2)
def _nuts() -> Any:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    kernel = NUTS(_regression(numpyro, dist), max_tree_depth=3)
    chain = MCMC(kernel, num_warmup=3, num_samples=3, progress_bar=False)
    chain.run(jax.random.PRNGKey(0), X, Y[:, 0])
    return chain.get_samples()


def _regression(numpyro: Any, dist: Any) -> Callable[..., None]:
    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 1).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    return model


@program("Diffrax, a neural differential equation", "diffrax", tolerance=1e-3)
def _diffrax() -> Any:
    import diffrax

    def field(t: Any, y: Any, w: Any) -> Any:
        return jnp.tanh(w @ y)

    def loss(w: Any) -> Any:
        term, solver = diffrax.ODETerm(field), diffrax.Tsit5()
        controller = diffrax.PIDController(rtol=1e-3, atol=1e-3)
        options = {"args": w, "stepsize_controller": controller, "max_steps": 64}
        return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.1, jnp.ones(4), **options).ys.sum()

    return jax.jit(jax.value_and_grad(loss))(jnp.asarray(X[:4]))


@program("Optimistix, roots and least squares", "optimistix", tolerance=1e-3)
def _optimistix() -> Any:
    import optimistix as optx

    def root(a: Any) -> Any:
        solver = optx.Newton(rtol=1e-5, atol=1e-5)
        return optx.root_find(lambda y, a: y**3 - a, solver, jnp.ones(3), a).value.sum()

    def squares(a: Any) -> Any:
        solver = optx.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
        return optx.least_squares(lambda y, a: X @ y - a, solver, jnp.zeros(4), a).value.sum()

    found = jax.value_and_grad(root)(jnp.array([1.0, 2.0, 3.0]))
    return found, jax.jit(jax.grad(squares))(Y[:, 0])


@program("Lineax", "lineax", tolerance=1e-3)
def _lineax() -> Any:
    import lineax as lx

    def solve(a: Any) -> Any:
        operator = lx.MatrixLinearOperator(a @ a.T + jnp.eye(4), lx.positive_semidefinite_tag)
        direct = lx.linear_solve(operator, X[0]).value
        return (direct + lx.linear_solve(operator, X[1], lx.CG(1e-5, 1e-5)).value).sum()

    return jax.jit(jax.value_and_grad(solve))(X[:4])


# Devices.


@program("pmap on four devices")
def _pmap() -> Any:
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), _mlp())

    def step(params: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(_loss)(params, x, y)
        gradients = jax.lax.pmean(gradients, "i")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return jax.pmap(step, axis_name="i")(params, X.reshape(4, 2, 4), Y.reshape(4, 2, 2))


def _mesh() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:4]), ("i",))


@program("shard_map on four devices")
def _shard_map() -> Any:
    spec = jax.sharding.PartitionSpec

    def local(params: Any, x: Any, y: Any) -> Any:
        return jax.lax.pmean(_loss(params, x, y), "i")

    specs = {"mesh": _mesh(), "in_specs": (spec(), spec("i"), spec("i")), "out_specs": spec()}
    return jax.jit(jax.value_and_grad(jax.shard_map(local, **specs)))(_mlp(), X, Y)


@program("arrays on four devices")
def _sharded() -> Any:
    sharding = jax.sharding.NamedSharding(_mesh(), jax.sharding.PartitionSpec("i"))
    x, y = jax.device_put(X, sharding), jax.device_put(Y, sharding)
    return jax.jit(jax.value_and_grad(_loss))(_mlp(), x, y)


@program("donated buffers")
def _donated() -> Any:
    @partial(jax.jit, donate_argnums=0)
    def step(params: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(_loss)(params, X, Y))

    params = _mlp()
    for _ in range(3):
        params = step(params)
    return params


# Transformations.


@program("checkify")
def _checkify() -> Any:
    from jax.experimental import checkify

    def function(params: Any, x: Any) -> Any:
        found = _forward(params, x)
        checkify.check(jnp.isfinite(found).all(), "not finite")
        return jnp.log(found)

    checked = checkify.checkify(function, errors=checkify.all_checks)
    error, found = jax.jit(checked)(_mlp(), X)
    return jnp.isnan(found), str(error.get() or "").partition("\n")[0].partition(" at ")[0]


@program("Pallas, interpreted")
def _pallas() -> Any:
    from jax.experimental import pallas as pl

    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] @ y[...] + 1.0

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((8, 2), "float32"), interpret=True)
    return jax.jit(lambda x, w: jax.nn.relu(call(x * 2, w)))(X, X[:4, :2])


@program("Hessians, Jacobians")
def _hessian() -> Any:
    def function(w: Any) -> Any:
        return jnp.tanh(X @ w).sum() + jnp.where(jnp.all(w > -9), (w**2).sum(), 0.0)

    w = jnp.ones(4) / 3
    vector = jax.jvp(jax.grad(function), (w,), (w,))[1]
    return jax.hessian(function)(w), jax.jit(jax.jacfwd(jax.jacrev(function)))(w), vector


@program("linearize, vjp, linear_transpose")
def _linearize() -> Any:
    found, push = jax.linearize(lambda w: jnp.sin(X @ w), jnp.ones(4))
    _, pull = jax.vjp(lambda w: jnp.cos(X @ w), jnp.ones(4))
    transpose = jax.linear_transpose(lambda w: X @ w, jnp.ones(4))
    return found, push(jnp.ones(4)), pull(jnp.ones(8)), transpose(jnp.ones(8))


@program("custom_vjp")
def _custom_vjp() -> Any:
    @jax.custom_vjp
    def clip(x: Any) -> Any:
        return x * 1.0

    clip.defvjp(lambda x: (clip(x), x), lambda x, g: (jnp.clip(g, -0.1, 0.1) * jnp.sign(x),))
    return jax.jit(jax.value_and_grad(lambda p: (clip(_forward(p, X)) ** 2).sum()))(_mlp())


@program("custom_jvp")
def _custom_jvp() -> Any:
    @jax.custom_jvp
    def softplus(x: Any) -> Any:
        return jnp.log1p(jnp.exp(x))

    softplus.defjvp(lambda p, t: (softplus(*p), t[0] * jax.nn.sigmoid(p[0])))

    def loss(params: Any) -> Any:
        return softplus(_forward(params, X)).sum()

    return jax.value_and_grad(loss)(_mlp()), jax.jvp(softplus, (X,), (X,))


@program("custom_root, custom_linear_solve")
def _implicit() -> Any:
    def root(a: Any) -> Any:
        def solve(f: Any, x: Any) -> Any:
            return jax.lax.fori_loop(0, 20, lambda _, x: x - f(x) / (2 * x), x)

        tangent = lambda f, y: y / f(jnp.ones_like(y))  # noqa: E731
        return jax.lax.custom_root(lambda x: x**2 - a, jnp.ones(()), solve, tangent)

    matrix = jnp.asarray(X[:4] @ X[:4].T + np.eye(4, dtype="float32"))

    def linear(b: Any) -> Any:
        solve = lambda _, b: jnp.linalg.solve(matrix, b)  # noqa: E731
        return jax.lax.custom_linear_solve(lambda v: matrix @ v, b, solve, symmetric=True).sum()

    return jax.value_and_grad(root)(2.0), jax.jit(jax.value_and_grad(linear))(X[0])


@program("loops and branches")
def _control() -> Any:
    def function(w: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            carry = jax.lax.cond(
                x.sum() > 0, lambda c: jnp.tanh(c + x @ w), lambda c: c * 0.5, carry
            )
            return carry, carry.sum()

        found, sums = jax.lax.scan(body, jnp.zeros(4), X)
        return found.sum() + sums.mean()

    w = jnp.asarray(X[:4])
    steps = jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] @ w / 3), (0, w))
    return jax.jit(jax.value_and_grad(function))(w), steps


# Running.


class Watch(amanda.Tool):
    """Analyses every op, and inserts nothing."""

    def __init__(self) -> None:
        super().__init__()
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(lambda context: None, backward, require_outputs)


class Nothing(amanda.Tool):
    """Inserts routines that return None."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        """Insert routines around an op."""
        context.insert_before_op(_none)
        context.insert_after_op(_none)

    def backward(self, context: amanda.OpContext) -> None:
        """Insert routines around a backward op."""
        context.insert_before_backward_op(_none)
        context.insert_after_backward_op(_none)


def _none(*values: Any) -> None:
    """Return None."""


#: Way to run a program -> applies its tools.
WAYS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "watching": lambda: amanda.apply(Watch()),
    "None": lambda: amanda.apply(Nothing()),
    **{way: partial(shipped.applied, way) for way in shipped.WAYS},
}
#: Those in which each tool is applied alone, to find the one that causes a difference.
ALONE = {name: partial(shipped.applied, name) for name in shipped.LOOKING}


def observed(run: Callable[[], Any]) -> list[Any]:
    """Return what a program has computed, as arrays of NumPy and texts."""
    leaves = jax.tree.leaves(run())
    found = []
    for leaf in leaves:
        if isinstance(leaf, str):
            found.append(leaf)
            continue
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found.append(array if array.dtype.kind in "biuc" else array.astype("float64"))
    return found


def difference(expected: list[Any], found: list[Any], tolerance: float) -> str:
    """Return how results differ; empty if they do not."""
    if len(expected) != len(found):
        return f"{len(found)} results for {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if isinstance(one, str) or one.dtype.kind in "biu":
            if not np.array_equal(one, other):
                return f"result {number} differs"
            continue
        scale = max(float(np.nanmax(np.abs(one), initial=0)), 1.0)
        if not np.allclose(one, other, rtol=0, atol=scale * tolerance, equal_nan=True):
            return f"result {number} differs by {np.nanmax(np.abs(one - other)):.3g}"
    return ""


def outcome(
    one: Program, expected: list[Any], applied: Callable[[], AbstractContextManager[Any]]
) -> str:
    """Return what is wrong with a program under tools; empty if nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with applied():
                found = observed(one.run)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return difference(expected, found, one.tolerance)


def outcomes(only: str = "", ways: Collection[str] = WAYS) -> Iterator[tuple[str, str, str]]:
    """Yield programs, ways and what is wrong; without a way, why a program has no result.

    Args:
        only: A part of the programs' names.
        ways: Keys of `WAYS`.
    """
    for name, one in PROGRAMS.items():
        if only not in name:
            continue
        missing = [need for need in one.needs if importlib.util.find_spec(need) is None]
        if missing:
            yield name, "", f"needs {', '.join(missing)}"
            continue
        try:
            expected = observed(one.run)
            again = difference(expected, observed(one.run), one.tolerance)
        except Exception as error:
            again = f"{type(error).__name__}: {error}"
        if again:
            yield name, "", f"without tools: {again}"
            continue
        for way in ways:
            problem = outcome(one, expected, WAYS[way])
            yield name, way, problem
            for tool, applied in ALONE.items() if problem and way == shipped.LOOKS else ():
                if alone := outcome(one, expected, applied):
                    yield name, tool, alone


def main() -> int:
    """Run the programs; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--way", action="append", choices=WAYS, help="under these tools only")
    parser.add_argument(
        "--record", action="store_true", help="keep the results, and write the page"
    )
    options = parser.parse_args()
    ways = options.way or [*WAYS]
    failures, names = 0, set()
    for name, way, problem in outcomes(options.only, ways):
        if name not in names:
            names.add(name)
            print(name, flush=True)
        if problem:
            failures += bool(way)
            print(f"    {way}: {problem}" if way else f"    {problem}", flush=True)
        if options.record:
            record(name, way, problem)
    print(f"{len(names)} programs, {len(ways)} ways, {failures} differences")
    if options.record:
        PAGE.write_text(page())
    return 1 if failures else 0


def record(name: str, way: str, problem: str) -> None:
    """Keep one result of this environment, in the place of an older one."""
    file = RECORDS / f"{jax.__version__}.json"
    found = json.loads(file.read_text()) if file.exists() else {"programs": {}}
    found["python"] = platform.python_version()
    ways = found["programs"].setdefault(name, {})
    if way in ("", *WAYS):
        ways.pop("", None)
    for tool in ALONE if way == shipped.LOOKS else ():
        ways.pop(tool, None)  # They run alone, afterwards, if there is a difference.
    ways[way] = problem
    found.setdefault("commits", {}).setdefault(name, {})[way] = commit(PAGE.parent)[:8]
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")


def page() -> str:
    """Return the page of all results that are kept."""
    parts = [INTRODUCTION]
    for file in sorted(RECORDS.glob("*.json")):
        found = json.loads(file.read_text())
        rows = []
        for name in PROGRAMS:
            ways, commits = found["programs"].get(name, {}), found.get("commits", {}).get(name, {})
            ran = sorted({commits.get(way, "not noted") for way in ways})
            rows.append(f"| {name} | {_said(ways)} | {', '.join(ran)} |".replace("`", ""))
        head = f"## JAX {file.stem}\n\nPython {found['python']}.\n"
        columns = ["| program | result | commits |", "|---|---|---|"]
        parts.append("\n".join([head, *columns, *rows, ""]))
    return "\n".join(parts)


def _said(ways: Mapping[str, str]) -> str:
    """Return the cell of a program: which ways ran, and what is wrong."""
    ran = [way for way in WAYS if way in ways]
    wrong = [f"{way}: {problem}" if way else problem for way, problem in ways.items() if problem]
    if wrong or not ran:
        return "; ".join(wrong) or "not run"
    left = len(WAYS) - len(ran)
    return f"equal ({', '.join(ran)}; {left} ways not run)" if left else "equal"


if __name__ == "__main__":
    sys.exit(main())
