"""The example of steering at work: a prompt is answered as another one."""

from __future__ import annotations

import pytest
from example_scripts import load_example

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


def test_a_prompt_is_answered_as_another_one() -> None:
    found = load_example("steering/steer_a_language_model").steer(layer=3)
    assert found.before > 0.2
    # Nothing comes after the last layer that depends on other positions.
    assert found.after < 1e-4
