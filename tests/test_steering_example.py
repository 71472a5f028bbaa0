"""The example of steering at work: a prompt is answered as another one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

FILE = Path(__file__).parents[1] / "examples" / "steering" / "steer_a_language_model.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("steer_a_language_model", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for annotations.
    spec.loader.exec_module(module)
    return module


def test_a_prompt_is_answered_as_another_one() -> None:
    found = example().steer(layer=3)
    assert found.before > 0.2
    # Nothing comes after the last layer that depends on other positions.
    assert found.after < 1e-4
