"""Programs of `sin(x) * x` in the transformations of JAX, for any function as `sin`."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["NAMES", "Function", "programs"]

Function = Callable[[Any], Any]
Run = Callable[[], Any]


def programs(sin: Function) -> Mapping[str, Run]:
    """Return the programs by name. Each compiles at its first call and is warm afterwards."""

    def f(x: Any) -> Any:
        return sin(x) * x

    def total(x: Any) -> Any:
        return f(x).sum()

    x = jnp.array([0.3, 1.2, -0.7])
    rows = jnp.arange(6.0).reshape(2, 3)

    def scan(x: Any) -> Any:
        return lax.scan(lambda c, v: (f(c) + v, c), x, jnp.ones((4, 3)))[0]

    def while_loop(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]

    def fori(x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, v: f(v), x)

    def cond(x: Any) -> Any:
        return lax.cond(x[0] > 0, f, lambda v: v, x)

    def switch(x: Any) -> Any:
        return lax.switch(1, [lambda v: v, f, lambda v: v + 1], x)

    @jax.custom_vjp
    def by_hand(x: Any) -> Any:
        return f(x)

    by_hand.defvjp(lambda x: (f(x), x), lambda x, g: (g * sin(x),))

    @jax.custom_jvp
    def by_hand_forward(x: Any) -> Any:
        return f(x)

    @by_hand_forward.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        return f(*primals), tangents[0] * 3

    @functools.partial(jax.jit, donate_argnums=0)
    def donated(x: Any) -> Any:
        return f(x)

    def summed(function: Function) -> Function:
        return lambda v: function(v).sum()

    compiled = {
        "jit": jax.jit(f),
        "jit(grad)": jax.jit(jax.grad(total)),
        "jit(jit)": jax.jit(lambda y: jax.jit(f)(y) + 1),
        "jit(vmap)": jax.jit(jax.vmap(f)),
        "jit(jvp)": jax.jit(lambda y: jax.jvp(f, (y,), (y,))[1]),
        "jit(vmap(grad))": jax.jit(jax.vmap(jax.grad(total))),
        "jit(vmap(vmap))": jax.jit(jax.vmap(jax.vmap(lambda v: f(v) + 1))),
        "jit(hessian)": jax.jit(jax.hessian(total)),
        "jit(grad(checkpoint))": jax.jit(jax.grad(jax.checkpoint(total))),
        "jit(vectorize)": jax.jit(jnp.vectorize(f, signature="(n)->(n)")),
        "jit(partial)": jax.jit(functools.partial(lambda scale, v: f(v) * scale, 2.0)),
        "jit(scan)": jax.jit(scan),
        "jit(grad(scan))": jax.jit(jax.grad(summed(scan))),
        "jit(while)": jax.jit(while_loop),
        "jit(remat)": jax.jit(jax.grad(summed(jax.checkpoint(f)))),
        "jit(grad(custom_vjp))": jax.jit(jax.grad(summed(by_hand))),
        "checkpoint_policy": jax.jit(
            jax.grad(summed(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)))
        ),
    }
    inner, inner_total, inner_grad = jax.jit(f), jax.jit(total), jax.jit(jax.grad(total))

    def made_and_evaluated() -> Any:
        jaxpr = jax.make_jaxpr(f)(x)
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x)[0]

    runs: dict[str, Run] = {
        "eager": lambda: f(x),
        "grad": lambda: jax.grad(total)(x),
        "value_and_grad": lambda: jax.value_and_grad(total)(x)[1],
        "vjp": lambda: jax.vjp(f, x)[1](x)[0],
        "grad(jit)": lambda: jax.grad(inner_total)(x),
        "grad(jit(grad))": lambda: jax.grad(lambda y: inner_grad(y).sum())(x),
        "vmap": lambda: jax.vmap(f)(rows),
        "vmap(jit)": lambda: jax.vmap(inner)(rows),
        "vmap(grad)": lambda: jax.vmap(jax.grad(total))(rows),
        "jvp": lambda: jax.jvp(f, (x,), (x,))[1],
        "hessian": lambda: jax.hessian(total)(x),
        "jacrev": lambda: jax.jacrev(f)(x),
        "jacfwd": lambda: jax.jacfwd(f)(x),
        "grad(grad)": lambda: jax.grad(lambda y: jax.grad(total)(y).sum())(x),
        "scan": lambda: scan(x),
        "grad(scan)": lambda: jax.grad(summed(scan))(x),
        "while": lambda: while_loop(x),
        "fori": lambda: fori(x),
        "cond": lambda: cond(x),
        "grad(cond)": lambda: jax.grad(summed(cond))(x),
        "switch": lambda: switch(x),
        "map": lambda: lax.map(f, rows),
        "associative_scan": lambda: lax.associative_scan(
            lambda a, b: f(a) + b, jnp.arange(9.0).reshape(3, 3)
        ),
        "remat": lambda: jax.grad(summed(jax.checkpoint(f)))(x),
        "custom_vjp": lambda: by_hand(x),
        "grad(custom_vjp)": lambda: jax.grad(summed(by_hand))(x),
        "custom_jvp": lambda: by_hand_forward(x),
        "jvp(custom_jvp)": lambda: sum(jax.jvp(by_hand_forward, (x,), (x,))),
        "make_jaxpr and eval_jaxpr": made_and_evaluated,
        "ahead of time": lambda: jax.jit(f).lower(x).compile()(x),
        "linearize": lambda: jax.linearize(f, x)[1](x),
        "donated": lambda: donated(jnp.array(np.asarray(x))),
    }
    for name, function in compiled.items():
        given = rows if "vmap" in name else x
        runs[name] = functools.partial(function, given)
    return runs


NAMES = tuple(programs(jnp.sin))
