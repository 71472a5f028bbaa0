"""MACs of twenty layers of Flax: closed forms, and XLA's own count where it counts alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import amanda
from amanda_tools.flops import Flops


class Layer(NamedTuple):
    """A layer, the shape it takes, and its closed form.

    Attributes:
        make: Returns the layer.
        shape: The shape of its input.
        macs: Its multiply-accumulates.
        xla: Whether XLA's analysis counts the same. It leaves out padding, and counts what is no
            product: biases, activations and normalization.
    """

    make: Callable[[nnx.Rngs], Callable[..., Any]]
    shape: tuple[int, ...]
    macs: int
    xla: bool = True


def _conv(channels: int, kernel: Any, **given: Any) -> Callable[[nnx.Rngs], Callable[..., Any]]:
    settings = {"padding": "VALID", "use_bias": False} | given
    return lambda rngs: nnx.Conv(4, channels, kernel, rngs=rngs, **settings)


def _attention(rngs: nnx.Rngs) -> Callable[..., Any]:
    made: Callable[..., Any] = nnx.MultiHeadAttention(2, 8, use_bias=False, decode=False, rngs=rngs)
    return made


def _cell(kind: Any) -> Callable[[nnx.Rngs], Callable[..., Any]]:
    def make(rngs: nnx.Rngs) -> Callable[..., Any]:
        cell = kind(4, 6, rngs=rngs)
        carry = cell.initialize_carry((5, 4), rngs)
        return lambda x: cell(carry, x)[1]

    return make


LAYERS = {
    # Batch times inputs times outputs.
    "Linear": Layer(lambda r: nnx.Linear(4, 6, use_bias=False, rngs=r), (3, 4), 3 * 4 * 6),
    "Linear with a bias": Layer(lambda r: nnx.Linear(4, 6, rngs=r), (3, 4), 3 * 4 * 6, False),
    "Linear of sequences": Layer(
        lambda r: nnx.Linear(4, 6, use_bias=False, rngs=r), (3, 5, 4), 3 * 5 * 4 * 6
    ),
    "LinearGeneral": Layer(
        lambda r: nnx.LinearGeneral(4, (2, 3), use_bias=False, rngs=r), (5, 4), 5 * 4 * 2 * 3
    ),
    "LinearGeneral of two axes": Layer(
        lambda r: nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), use_bias=False, rngs=r),
        (5, 2, 3),
        5 * 2 * 3 * 4,
    ),
    "Einsum": Layer(lambda r: nnx.Einsum("bi,ihd->bhd", (4, 2, 3), rngs=r), (5, 4), 5 * 4 * 2 * 3),
    # Batch times output positions times kernel times inputs of a group times outputs.
    "Conv of one axis": Layer(_conv(6, 3), (2, 9, 4), 2 * 7 * 3 * 4 * 6),
    "Conv": Layer(_conv(6, (3, 3)), (2, 8, 9, 4), 2 * 6 * 7 * 9 * 4 * 6),
    "Conv of three axes": Layer(_conv(5, (2, 2, 2)), (1, 4, 5, 6, 4), 3 * 4 * 5 * 8 * 4 * 5),
    "Conv of one position": Layer(_conv(6, (1, 1)), (2, 5, 5, 4), 2 * 25 * 4 * 6),
    "Conv with strides": Layer(_conv(6, (3, 3), strides=2), (2, 9, 9, 4), 2 * 16 * 9 * 4 * 6),
    "Conv with dilation": Layer(
        _conv(6, (3, 3), kernel_dilation=2), (2, 9, 9, 4), 2 * 25 * 9 * 4 * 6
    ),
    "Conv in groups": Layer(
        _conv(6, (3, 3), feature_group_count=2), (2, 8, 8, 4), 2 * 36 * 9 * 2 * 6
    ),
    "Conv of each channel": Layer(
        _conv(8, (3, 3), feature_group_count=4), (2, 8, 8, 4), 2 * 36 * 9 * 1 * 8
    ),
    "Conv with padding": Layer(
        _conv(6, (3, 3), padding="SAME"), (2, 8, 8, 4), 2 * 64 * 9 * 4 * 6, False
    ),
    # Four projections of 8 to 8, and two products of each pair of five positions.
    "MultiHeadAttention": Layer(_attention, (3, 5, 8), 3 * (4 * 5 * 8 * 8 + 2 * 5 * 5 * 8), False),
    # Three and four gates, of the input and of the state.
    "GRUCell": Layer(_cell(nnx.GRUCell), (5, 4), 5 * 3 * (4 + 6) * 6, False),
    "LSTMCell": Layer(_cell(nnx.LSTMCell), (5, 4), 5 * 4 * (4 + 6) * 6, False),
    "SimpleCell": Layer(_cell(nnx.SimpleCell), (5, 4), 5 * (4 + 6) * 6, False),
    "LoRA": Layer(lambda r: nnx.LoRA(4, 2, 6, rngs=r), (3, 4), 3 * (4 * 2 + 2 * 6)),
    "LayerNorm": Layer(lambda r: nnx.LayerNorm(4, rngs=r), (3, 4), 0, False),
}


def test_there_are_twenty_layers() -> None:
    assert len(LAYERS) >= 20


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_macs_of_its_closed_form(name: str, jitted: bool) -> None:
    make, shape, macs, xla = LAYERS[name]
    layer, x = make(nnx.Rngs(0)), jnp.ones(shape)
    run = jax.jit(lambda x: layer(x))
    with amanda.apply(tool := Flops()):
        (run if jitted else layer)(x)
    assert (tool.result().macs, tool.result().unknown) == (macs, [])
    if xla:
        assert run.lower(x).cost_analysis()["flops"] == 2 * macs
