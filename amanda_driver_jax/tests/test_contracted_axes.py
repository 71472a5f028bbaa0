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
