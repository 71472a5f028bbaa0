"""The example of fault injection at work: the most significant bit of exponents matters."""

from __future__ import annotations

import pytest
from example_scripts import load_example

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


def test_exponents_matter_and_mantissas_do_not() -> None:
    pytest.importorskip("sklearn")
    campaign = load_example("faults/flip_bits").campaign
    exponent, _, _ = campaign("weight", [30], 20).rate("sdc")
    mantissa, _, _ = campaign("weight", "mantissa", 20).rate("sdc")
    assert exponent > 0.3
    assert mantissa < 0.1
