"""Parts of a program that are not the model: what it marks, and steps of optimizers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.example_libraries import optimizers

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


def _net(parameters: dict[str, jax.Array]) -> jax.Array:
    return jnp.tanh(jnp.ones((2, 2)) @ parameters["w"])


def _loss(parameters: dict[str, jax.Array]) -> jax.Array:
    labels = jnp.zeros((2,), int)
    return optax.softmax_cross_entropy_with_integer_labels(_net(parameters), labels).mean()


def test_losses_of_optax_are_the_models() -> None:
    found: dict[str, set[str]] = {}
    parameters = {"w": jnp.ones((2, 2))}
    with amanda.apply(_look(found, {})):
        jax.jit(jax.grad(_loss))(parameters)
    assert set(found) == {"model"}
    assert {"matmul", "tanh", "exp", "log"} <= found["model"]


def test_a_loss_that_an_optimizer_computes_again_is_the_models() -> None:
    found: dict[str, set[str]] = {}
    parameters = {"w": jnp.ones((2, 2))}
    optimizer = optax.lbfgs()
    state = optimizer.init(parameters)
    value, gradient = jax.value_and_grad(_loss)(parameters)
    with amanda.apply(_look(found, {})):
        optimizer.update(gradient, state, parameters, value=value, grad=gradient, value_fn=_loss)
    assert {"matmul", "tanh", "exp", "log"} <= found["model"]
    assert not found["optimizer"] & {"matmul", "tanh", "exp", "log"}
    assert "vdot" in found["optimizer"]


def test_initializers_and_optimizers_of_jax_are_not_the_model() -> None:
    found: dict[str, set[str]] = {}
    start, update, read = optimizers.momentum(0.1, 0.9)
    with amanda.apply(_look(found, {})):
        weight = jax.nn.initializers.glorot_normal()(jax.random.key(0), (4, 4))
        state = update(0, jnp.ones((4, 4)), start(weight))
        optimizers.clip_grads(read(state), 1.0)
    assert "sqrt" in found["init"]
    assert {"multiply", "add", "sqrt"} <= found["optimizer"]
    assert not found.get("model", set()) & {"multiply", "add", "sqrt"}
