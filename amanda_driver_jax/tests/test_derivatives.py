"""Looking never changes what JAX may do: derivatives of each kind run, and are those without tools.

Each program runs under tools that observe or look at every value and every gradient, on the host
and as a part of the program. None of them edits anything.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import amanda
from amanda_core.errors import UnsupportedError
from amanda_tools.flops import Flops

X = jnp.array([0.5, 1.0, 2.0])


@jax.custom_jvp
def softplus(x: Any) -> Any:
    return jnp.log1p(jnp.exp(x))


@softplus.defjvp
def _softplus_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return softplus(x), jax.nn.sigmoid(x) * t


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * jnp.clip(g, -1, 1),))


def _root(a: Any) -> Any:
    """Return the square root by Newton's method; its derivative is implicit."""
    return lax.custom_root(
        lambda x: x * x - a,
        jnp.ones_like(a),
        lambda f, x: lax.fori_loop(0, 20, lambda _, v: v - f(v) / (2 * v), x),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


def _solve(b: Any) -> Any:
    matrix = jnp.eye(3) * 2 + 0.1
    return lax.custom_linear_solve(
        lambda v: jnp.dot(matrix, v) * 1.0,
        b,
        lambda _, v: jnp.linalg.solve(matrix, v),
        symmetric=True,
    )


def _curve(x: Any) -> Any:
    return jnp.sum(jnp.tanh(x) * jax.nn.gelu(x) + jax.nn.relu(x) ** 2)


def _scanned(x: Any) -> Any:
    return jnp.sum(lax.scan(lambda c, r: (jnp.sin(c) * r, jnp.exp(c)), 1.0, x)[1])


#: Programs whose results JAX computes in ways that leave out a backward program.
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "jnp.all": jax.grad(lambda x: jnp.where(jnp.all(x > 0), x, 0.0).sum()),
    "jit jnp.all": jax.jit(jax.grad(lambda x: jnp.where(jnp.all(x > 0), x, 0.0).sum())),
    "grad jit jnp.all": jax.grad(jax.jit(lambda x: jnp.where(jnp.all(x > 0), x, 0.0).sum())),
    "if jnp.all": jax.grad(lambda x: x.sum() if bool(jnp.all(x > 0)) else 0 * x.sum()),
    "cond": jax.grad(lambda x: lax.cond(jnp.all(x > 0), jnp.sum, lambda v: 0 * v.sum(), x)),
    "argmax": jax.grad(lambda x: x[jnp.argmax(x > 0)]),
    "custom_jvp": jax.grad(lambda x: softplus(x).sum()),
    "jit custom_jvp": jax.jit(jax.grad(lambda x: softplus(x).sum())),
    "grad jit custom_jvp": jax.grad(jax.jit(lambda x: softplus(x).sum())),
    "jvp custom_jvp": lambda x: jax.jvp(softplus, (x,), (x,)),
    "custom_vjp": jax.grad(lambda x: clipped(3 * x).sum()),
    "jvp": lambda x: jax.jvp(_curve, (x,), (x,)),
    "jvp jit": lambda x: jax.jvp(jax.jit(_curve), (x,), (x,)),
    "linearize": lambda x: jax.linearize(_curve, x)[1](x),
    "linear_transpose": lambda x: jax.linear_transpose(lambda v: jnp.sum(2.0 * v), x)(1.0),
    "hessian": jax.hessian(_curve),
    "hessian jit": jax.jit(jax.hessian(jax.jit(_curve))),
    "jacfwd": jax.jacfwd(lambda x: jnp.sin(x) * x),
    "jacrev": jax.jacrev(lambda x: jnp.sin(x) * x),
    "jacfwd jacfwd": jax.jacfwd(jax.jacfwd(_curve)),
    "jacrev jacrev": jax.jacrev(jax.jacrev(_curve)),
    "jvp scan": lambda x: jax.jvp(_scanned, (x,), (x,)),
    "grad scan": jax.grad(_scanned),
    "hessian scan": jax.hessian(_scanned),
    "custom_root": jax.grad(lambda x: _root(x).sum()),
    "jvp custom_root": lambda x: jax.jvp(_root, (x,), (x,)),
    "custom_linear_solve": jax.grad(lambda x: _solve(jnp.sin(x)).sum()),
    "remat": jax.grad(jax.checkpoint(_curve)),
    "jvp remat": lambda x: jax.jvp(jax.checkpoint(_curve), (x,), (x,)),
    "vmap grad": jax.vmap(jax.grad(lambda x: jnp.sin(x) * x)),
    "grad vmap": jax.grad(lambda x: jax.vmap(lambda v: jnp.sin(v) * v)(x).sum()),
}
#: Those that run in the short form of the session.
SAMPLE = {"jnp.all", "grad jit custom_jvp", "hessian", "custom_root", "jvp scan", "linearize"}
MARKED = [
    name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS
]


def tool(*, observe: bool, staged: bool) -> amanda.Tool:
    """Return a tool that looks at every value and gradient, and the count of its calls."""

    def look(*values: Any) -> None:
        pass

    routine = amanda.staged(look) if staged else look

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(routine, observe=observe)
        context.insert_after_op(routine, observe=observe)

    def analyse_backward(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(routine, observe=observe)
        context.insert_after_backward_op(routine, observe=observe)

    found = amanda.Tool()
    found.add_inst_for_op(analyse)
    found.add_inst_for_op(analyse_backward, backward=True)
    return found


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("observe", [False, True], ids=["None", "observe"])
@pytest.mark.parametrize("name", MARKED)
def test_looking_changes_no_derivative(name: str, observe: bool, staged: bool) -> None:
    run = PROGRAMS[name]
    plain = jax.tree.leaves(run(X))
    with amanda.apply(tool(observe=observe, staged=staged)):
        found = jax.tree.leaves(run(X))
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(found, plain, strict=True))
    again = jax.tree.leaves(run(X))
    assert all(map(np.array_equal, again, plain))


def editing(op_type: str, routine: Callable[..., Any], **options: Any) -> amanda.Tool:
    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == op_type:
            context.insert_before_op(routine, **options)

    found = amanda.Tool()
    found.add_inst_for_op(analyse)
    return found


def test_an_edit_in_forward_mode_passes_the_tangent_straight() -> None:
    def run(x: Any) -> Any:
        return jax.jvp(lambda v: jnp.sin(v) * v, (x,), (jnp.ones_like(x),))

    for staged in (False, True):
        double = amanda.staged(lambda v: v * 2) if staged else lambda v: v * 2
        for program in (run, jax.jit(run)):
            with amanda.apply(editing("sin", double, inputs=[0])):
                value, tangent = program(X)
            assert np.allclose(value, np.sin(2 * X) * X, rtol=1e-5)
            assert np.allclose(tangent, np.cos(2 * X) * X + np.sin(2 * X), rtol=1e-5)


def test_an_edit_of_several_values_where_jax_transposes_is_refused_by_name() -> None:
    run = jax.jit(lambda x: jax.jvp(softplus, (x,), (x,)))
    run(X)
    tool = editing("mul", lambda *values: [value * 2 for value in values])
    with amanda.apply(tool), pytest.raises(UnsupportedError, match="custom_jvp"):
        run(X)


@pytest.mark.parametrize(
    ("wanted", "macs"), [((0,), (24, 24)), ((1,), (24, 24)), ((0, 1), (24, 48))]
)
@pytest.mark.parametrize("mode", ["eager", "jit(grad)", "grad(jit)"])
def test_products_whose_gradients_nothing_needs_are_not_counted(
    mode: str, wanted: tuple[int, ...], macs: tuple[int, int]
) -> None:
    def loss(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w).sum()

    run = jax.grad(jax.jit(loss) if mode == "grad(jit)" else loss, wanted)
    run = jax.jit(run) if mode == "jit(grad)" else run
    tool = Flops()
    with amanda.apply(tool):
        run(jnp.ones((4, 3)), jnp.ones((3, 2)))
    result = tool.result()
    assert (result.macs, result.backward_macs) == macs


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_layers_that_flax_scans(jitted: bool) -> None:
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):  # type: ignore[misc,name-defined]
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return nn.relu(nn.Dense(3, use_bias=False)(x)), None

    kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
    model = nn.scan(Layer, **kinds)()
    parameters = model.init(jax.random.key(0), X, None)

    def loss(parameters: Any) -> Any:
        return model.apply(parameters, X, None)[0].sum()

    run = jax.jit(jax.value_and_grad(loss)) if jitted else jax.value_and_grad(loss)
    plain = jax.tree.leaves(run(parameters))
    for observe in (False, True):
        with amanda.apply(tool(observe=observe, staged=False)):
            found = jax.tree.leaves(run(parameters))
        assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(found, plain, strict=True))
