"""Under `vmap` an observer on the host is called once, with all examples and their axes."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import amanda
from amanda_driver_jax.facts import FACTS

W = jnp.arange(6.0).reshape(3, 2) - 2
ROWS = jnp.linspace(-1, 1, 12).reshape(4, 3)

Seen = list[tuple[np.ndarray[Any, Any], tuple[int, ...]]]


def looking(seen: Seen, *, backward: bool = False) -> amanda.Tool:
    def look(*values: Any) -> None:
        seen.extend((np.asarray(value), FACTS.batch_axes(value)) for value in values)

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "matmul":
            if backward:
                context.insert_after_backward_op(look, observe=True)
            else:
                context.insert_before_op(look, observe=True)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    return tool


def model(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def observed(run: Callable[[], Any], **options: Any) -> Seen:
    seen: Seen = []
    with amanda.apply(looking(seen, **options)):
        run()
    for value, axes in seen:
        assert FACTS.batch_axes(value) == ()
        assert all(0 <= axis < value.ndim for axis in axes)
    return seen


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_values_of_all_examples_come_in_one_call(jitted: bool) -> None:
    run = jax.vmap(model, (None, 0))
    run = jax.jit(run) if jitted else run
    (x, x_axes), (w, w_axes) = observed(lambda: run(W, ROWS))
    assert np.array_equal(x, ROWS)
    assert np.array_equal(w, W)
    assert (x_axes, w_axes) == ((0,), ())


def test_a_tool_may_ask_for_each_example() -> None:
    seen: list[Any] = []

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "matmul":
            context.insert_before_op(seen.append, inputs=[0], observe=True)

    tool = amanda.Tool()
    tool.by_example = True
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        jax.jit(jax.vmap(model, (None, 0)))(W, ROWS)
    assert sorted(np.asarray(x).tolist() for x in seen) == sorted(ROWS.tolist())


def test_the_axes_of_nested_maps() -> None:
    values = jnp.stack([ROWS, ROWS + 1], axis=2)  # example, feature, group
    run = jax.vmap(jax.vmap(model, (None, 0)), (None, 2))
    (x, axes), _ = observed(lambda: run(W, values))
    assert len(axes) == 2
    groups, examples = axes if x.shape[axes[0]] == 2 else axes[::-1]
    found = np.moveaxis(x, (examples, groups), (0, 2))
    assert np.array_equal(found, values)


@pytest.mark.parametrize("how", ["grad(vmap)", "jit(grad(vmap))", "vmap(grad)"])
def test_gradients_of_weights_are_sums_over_the_examples(how: str) -> None:
    def loss(w: Any) -> Any:
        return jax.vmap(model, (None, 0))(w, ROWS).sum()

    each = jax.vmap(jax.grad(lambda w, x: model(w, x).sum()), (None, 0))
    run = {
        "grad(vmap)": lambda: jax.grad(loss)(W),
        "jit(grad(vmap))": lambda: jax.jit(jax.grad(loss))(W),
        "vmap(grad)": lambda: each(W, ROWS),
    }[how]
    slopes = 1 - np.tanh(ROWS @ W) ** 2
    by_hand = np.einsum("ni,no->nio", ROWS, slopes)
    gradients = [(g, axes) for g, axes in observed(run, backward=True) if g.dtype != object]
    ((gradient, axes),) = gradients
    if how == "vmap(grad)":  # Here each example has gradients of its own.
        assert axes == (0,)
        assert np.allclose(gradient, by_hand, rtol=1e-5, atol=1e-6)
    else:
        assert axes == ()
        assert np.allclose(gradient, by_hand.sum(0), rtol=1e-5, atol=1e-6)


def test_an_edit_of_a_mapped_value_is_that_of_each_example() -> None:
    def centred(x: Any) -> Any:
        return x - x.mean()

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "matmul":
            context.insert_before_op(centred, inputs=[0])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        found = jax.jit(jax.vmap(model, (None, 0)))(W, ROWS)
    by_hand = np.tanh((ROWS - ROWS.mean(1, keepdims=True)) @ W)
    assert np.allclose(found, by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_pass_edits_of_mapped_and_other_values_together(staged: bool, axis: int) -> None:
    def double(*values: Any) -> list[Any]:
        return [value * 2 for value in values]

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "matmul":
            context.insert_before_op(amanda.staged(double) if staged else double)

    def loss(w: Any, x: Any) -> Any:
        return jax.vmap(lambda x: (x @ w).sum(), axis)(x).sum()

    rows = ROWS if axis == 0 else ROWS.T
    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        value, gradients = jax.value_and_grad(loss, (0, 1))(W, rows)
    # The gradient of a new value goes straight to the old one.
    assert np.allclose(value, 4 * (ROWS @ W).sum(), rtol=1e-5, atol=1e-5)
    by_w, by_x = gradients
    assert np.allclose(by_w, 2 * np.outer(ROWS.sum(0), np.ones(2)), rtol=1e-5, atol=1e-5)
    each = np.tile(2 * np.asarray(W).sum(1), (4, 1))
    assert np.allclose(by_x, each if axis == 0 else each.T, rtol=1e-5)
