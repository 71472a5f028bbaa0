"""Which axes of a weight a product of MXNet sums over: tools against NumPy's arithmetic."""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from contraction_cases import CASES, TOOLS, Case
from mxnet import gluon

import amanda


def _einsum(case: Case) -> Callable[[Any, Any], Any]:
    return lambda x, w: mx.np.einsum(case.equation, *((w, x) if case.swapped else (x, w)))


#: Name -> a product, and how MXNet computes it.
PRODUCTS: dict[str, tuple[Case, Callable[[Any, Any], Any]]] = {
    **{name: (case, _einsum(case)) for name, case in CASES.items()},
    "tensordot": (CASES["heads_first"], lambda x, w: mx.np.tensordot(x, w, ([1], [1]))),
    "tensordot of two": (
        Case("btnh,nhd->btd", (2, 5, 2, 4), (2, 4, 3), "IIO"),
        lambda x, w: mx.np.tensordot(x, w, 2),
    ),
    "matmul": (CASES["experts"], mx.np.matmul),
    "batch_dot": (CASES["experts"], mx.npx.batch_dot),
    "dot": (
        Case("bd,dnh->bnh", (5, 4), (4, 2, 3), "IOO"),
        lambda x, w: mx.nd.dot(x.as_nd_ndarray(), w.as_nd_ndarray()).as_np_ndarray(),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_has_the_axes_of_a_weight(tool: str, name: str) -> None:
    case, run = PRODUCTS[name]
    make, edited = TOOLS[tool]
    x, weight = case.operands

    class Model(gluon.Block):
        def __init__(self) -> None:
            super().__init__()
            self.w = self.params.get("w", shape=weight.shape)

        def forward(self, x: Any) -> Any:
            return run(x, self.w.data())

    mx.npx.set_np()
    try:
        model = Model()
        model.initialize()
        model.w.set_data(mx.np.array(weight))
        with amanda.apply(used := make()):
            found = model(mx.np.array(x)).asnumpy()
    finally:
        mx.npx.reset_np()
    assert "100.0% of the parameters reached" in str(used.result().table())
    np.testing.assert_allclose(found, case.of(x, edited(case, weight)), rtol=1e-4, atol=1e-4)
