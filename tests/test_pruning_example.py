"""The example of pruning a mixture of experts at work."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

FILE = Path(__file__).parents[1] / "examples" / "pruning" / "prune_a_mixture_of_experts.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("prune_a_mixture_of_experts", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for annotations.
    spec.loader.exec_module(module)
    return module


def test_experts_are_pruned_and_those_that_no_token_reached_are_named() -> None:
    found = example().prune(0.5)
    assert found.distance > 0.01
    assert found.loaded == found.distance
    result = found.result
    # Three tokens cannot reach eight experts with two each.
    names = {weight.name for weight in result.unreached}
    assert any("experts" in name for name in names)
    assert result.reached + sum(one.elements for one in result.unreached) == result.parameters
