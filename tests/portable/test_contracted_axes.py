"""Which axes of a weight a product of TensorFlow sums over: tools against NumPy's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contraction_cases import CASES, TOOLS, Case

import amanda

tf: Any = pytest.importorskip("tensorflow")
keras: Any = pytest.importorskip("keras")


def _einsum(case: Case) -> Callable[[Any, Any], Any]:
    return lambda x, w: tf.einsum(case.equation, *((w, x) if case.swapped else (x, w)))


#: Name -> a product, and how TensorFlow computes it.
PRODUCTS: dict[str, tuple[Case, Callable[[Any, Any], Any]]] = {
    **{name: (case, _einsum(case)) for name, case in CASES.items()},
    "ellipsis": (
        Case("btd,dnh->btnh", (2, 5, 4), (4, 2, 3), "IOO"),
        lambda x, w: tf.einsum("...d,dnh->...nh", x, w),
    ),
    "matmul": (CASES["experts"], tf.matmul),
    "transposed": (
        Case("ebd,efd->ebf", (3, 5, 4), (3, 2, 4), "GOI"),
        lambda x, w: tf.matmul(x, w, transpose_b=True),
    ),
    "broadcast": (
        Case("abd,edf->eabf", (1, 5, 4), (3, 4, 2), "OIO"),
        lambda x, w: tf.matmul(x, w)[:, None],
    ),
}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_has_the_axes_of_a_weight(tool: str, name: str, graph: bool) -> None:
    case, run = PRODUCTS[name]
    make, edited = TOOLS[tool]
    x, weight = case.operands
    variable = tf.Variable(weight)

    def product(x: Any) -> Any:
        return run(x, variable)

    with amanda.apply(used := make()):
        found = (tf.function(product) if graph else product)(tf.constant(x)).numpy()
    assert "100.0% of the parameters reached" in str(used.result().table())
    np.testing.assert_allclose(found, case.of(x, edited(case, weight)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tool", ["prune", "per_tensor", "per_channel"])
def test_attention_of_keras_has_one_matrix_for_all_heads(tool: str) -> None:
    """Query kernels have the axes ``dnh``, of which the first is summed over; that of the output
    has ``nhd``, of which the first two are.
    """
    make, edited = TOOLS[tool]
    layer = keras.layers.MultiHeadAttention(2, 4, use_bias=False)
    x = np.random.RandomState(0).randn(2, 5, 8).astype("float32")
    layer(x, x)
    letters = ["IOO", "IOO", "IOO", "IIO"]
    weights = [one * np.geomspace(1, 4, len(one))[:, None, None] for one in layer.get_weights()]
    layer.set_weights(weights)
    with amanda.apply(used := make()):
        found = layer(x, x)
    assert "100.0% of the parameters reached" in str(used.result().table())
    cases = [Case("", (), one.shape, form) for one, form in zip(weights, letters, strict=True)]
    layer.set_weights([edited(case, one) for case, one in zip(cases, weights, strict=True)])
    np.testing.assert_allclose(found, layer(x, x), rtol=1e-4, atol=1e-4)
