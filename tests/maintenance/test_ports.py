"""The sweep of mistakes planted in ports: the right layers are named, equal ports are equal, and it
can fail.
"""

from __future__ import annotations

import pytest
from maintenance.sweeps.ports import PORTS, Found, layer_of, run

from amanda_tools.diff import DiffResult

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


@pytest.mark.parametrize("name", PORTS)
def test_the_layers_of_mistakes_are_named(name: str) -> None:
    found = run(name)
    assert len(found) >= 11
    assert [one.conclusion for one in found if not one.right] == []
    assert [one.likely for one in found if one.kind and one.is_kind_right is False] == []


def test_another_layer_is_a_miss() -> None:
    assert layer_of(DiffResult()) is None
    wrong = Found("mlp", "bias", "1", "2", False, "scale: B is 2 times A", "")
    assert wrong.is_kind_right is False
    assert Found("mlp", "bias", "1", "1", True, "bias: it lacks one", "").is_kind_right
