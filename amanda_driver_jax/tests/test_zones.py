"""Parts of a program that are not the model: what it marks, and steps of optimizers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import amanda
from amanda_core.engine.context import OpContext
from amanda_core.testing.kit.tools import tool


def _look(found: dict[str, set[str]], ids: dict[str, set[str]]) -> amanda.Tool:
    def look(context: OpContext) -> None:
        found.setdefault(context.zone, set()).add(context.op_type)
        ids.setdefault(context.zone, set()).add(context.op_id)

    return tool(look)


def test_a_marked_zone_has_ops_of_its_own() -> None:
    found: dict[str, set[str]] = {}
    ids: dict[str, set[str]] = {}
    x = jnp.ones((2, 2))
    with amanda.apply(_look(found, ids)):
        for zone in ("model", "metrics"):
            with amanda.zone(zone):
                jnp.sin(x)
        jnp.cos(x)
    assert found == {"model": {"sin", "cos"}, "metrics": {"sin"}}
    assert not ids["model"] & ids["metrics"]


def test_everything_that_an_update_calls_is_the_optimizers() -> None:
    found: dict[str, set[str]] = {}
    parameters = {"w": jnp.ones((2, 2))}

    def damped(updates: object, state: object, params: object = None) -> tuple[object, object]:
        return jax.tree.map(lambda g: g @ g, updates), state

    rule = optax.GradientTransformation(lambda params: optax.EmptyState(), damped)
    optimizer = optax.chain(rule, optax.scale(-0.1))
    state = optimizer.init(parameters)
    with amanda.apply(_look(found, {})):
        gradients = jax.grad(lambda p: jnp.tanh(p["w"]).sum())(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        optax.apply_updates(parameters, updates)
    assert "tanh" in found["model"]
    assert "matmul" not in found["model"]
    assert "matmul" in found["optimizer"]
