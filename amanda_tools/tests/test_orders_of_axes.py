"""Order in which the axes of weights and activations are processed."""

from __future__ import annotations

import pytest

from amanda_tools.sparsity.zeros import Order, order_of, order_of_weight


@pytest.mark.parametrize(
    ("layout", "axes"),
    [("OIHW", (0, 1, 2, 3)), ("HWIO", (3, 2, 0, 1)), ("OI", (0, 1)), ("IO", (1, 0))],
)
def test_orders_of_weights(layout: str, axes: tuple[int, ...]) -> None:
    found = order_of_weight(layout)
    assert found.rows + found.columns == axes
    assert found.channels == found.rows == (layout.index("O"),)
    assert found.group == found.inner == layout.index("I")


def test_orders_of_activations() -> None:
    assert order_of(4, "NCHW", False) == Order((0, 2, 3), (1,), 1, (1,))
    assert order_of(3, "NCHW", False) == Order((1, 2), (0,), 0, (0,))
    assert order_of(4, "NHWC", True) == Order((0, 1, 2), (3,), 3, (3,))
    assert order_of(4, None, True) == Order((0, 2, 3), (1,), 1, (1,))
    assert order_of(3, None, False) == Order((0, 1), (2,), 2, (2,))
    assert order_of(1, None, False) is None
