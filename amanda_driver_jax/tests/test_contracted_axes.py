"""Which axes of a weight a product of JAX sums over: tools against NumPy's arithmetic."""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contraction_cases import CASES, TOOLS, Case
from flax import nnx

import amanda
from amanda_tools.flops import Flops

F32 = {"preferred_element_type": jnp.float32}


def _einsum(case: Case) -> Callable[[Any, Any], Any]:
    return lambda x, w: jnp.einsum(case.equation, *((w, x) if case.swapped else (x, w)))


#: Name -> a product, and how JAX computes it.
PRODUCTS: dict[str, tuple[Case, Callable[[Any, Any], Any]]] = {
    **{name: (case, _einsum(case)) for name, case in CASES.items()},
    "tensordot": (CASES["heads_first"], lambda x, w: jnp.tensordot(x, w, [[1], [1]])),
    "matmul": (CASES["experts"], jnp.matmul),
    "dot": (Case("bd,edf->bef", (5, 4), (3, 4, 2), "OIO"), jnp.dot),
    "dot_general": (
        CASES["experts"],
        lambda x, w: jax.lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))), **F32),
    ),
    "mapped": (
        Case("sbd,dnh->sbnh", (2, 5, 4), (4, 2, 3), "IOO"),
        lambda x, w: jax.vmap(lambda x: jnp.einsum("bd,dnh->bnh", x, w))(x),
    ),
    "ragged": (
        Case("ebd,edf->ebf", (3, 2, 4), (3, 4, 2), "GIO"),
        lambda x, w: jax.lax.ragged_dot(x.reshape(6, 4), w, jnp.array([2, 2, 2]), **F32).reshape(
            3, 2, 2
        ),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_has_the_axes_of_a_weight(tool: str, name: str) -> None:
    case, run = PRODUCTS[name]
    make, edited = TOOLS[tool]
    x, weight = case.operands

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray(weight))

        def __call__(self, x: Any) -> Any:
            return run(x, self.w[...])

    with amanda.apply(used := make()):
        found = np.asarray(nnx.jit(lambda model, x: model(x))(Model(), jnp.asarray(x)))
    assert "100.0% of the parameters reached" in str(used.result().table())
    np.testing.assert_allclose(found, case.of(x, edited(case, weight)), rtol=1e-4, atol=1e-4)


def _ones(*shape: int) -> Any:
    return jnp.ones(shape)


def _attention(x: Any) -> Any:
    return jax.nn.dot_product_attention(x, x, x)


#: Name -> a function, its arguments, and the multiply-accumulates of each of its products.
COUNTED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = {
    "ab,bc->ac": (lambda a, b: jnp.einsum("ab,bc->ac", a, b), (_ones(4, 6), _ones(6, 5)), (120,)),
    "three": (
        lambda a, b, c: jnp.einsum("ab,bc,cd->ad", a, b, c),
        (_ones(8, 2), _ones(2, 7), _ones(7, 3)),
        # First the last two, which JAX chooses: 2 * 7 * 3 and 8 * 2 * 3.
        (42, 48),
    ),
    "ellipsis": (
        lambda a, b: jnp.einsum("...b,bc->...c", a, b),
        (_ones(2, 3, 4), _ones(4, 5)),
        (120,),
    ),
    "heads": (
        lambda a, b: jnp.einsum("bd,dnh->bnh", a, b),
        (_ones(4, 6), _ones(6, 2, 3)),
        (144,),
    ),
    "tensordot": (lambda a, b: jnp.tensordot(a, b, 1), (_ones(4, 6), _ones(6, 5)), (120,)),
    "attention": (_attention, (_ones(2, 7, 2, 4),), (784, 784)),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", COUNTED)
def test_the_products_of_a_contraction_are_counted(name: str, jitted: bool) -> None:
    run, arguments, products = COUNTED[name]

    def loss(*given: Any) -> Any:
        return jnp.sum(run(*given))

    forward, backward = (run, jax.grad(loss)) if not jitted else map(jax.jit, (run, jax.grad(loss)))
    with amanda.apply(tool := Flops()):
        forward(*arguments)
    result = tool.result()
    assert (result.macs, result.unknown) == (sum(products), [])
    everything = tuple(range(len(arguments)))
    gradient = jax.grad(loss, everything)
    with amanda.apply(tool := Flops()):
        (jax.jit(gradient) if jitted else gradient)(*arguments)
    assert tool.result().backward_macs == 2 * sum(products)
    if len(products) == 1:  # Of one of the two operands.
        with amanda.apply(tool := Flops()):
            backward(*arguments)
        assert tool.result().backward_macs == sum(products)


def test_products_without_an_order_are_not_counted() -> None:
    a, b, c, d = _ones(9, 2), _ones(2, 9), _ones(9, 2), _ones(2, 9)
    with amanda.apply(tool := Flops()):
        jnp.einsum("ab,bc,cd,de->ae", a, b, c, d, optimize=[(0, 1), (0, 1), (0, 1)])
    (unknown,) = tool.result().unknown
    assert unknown.problem == "the equation is not known"
