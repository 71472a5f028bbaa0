"""A sample of the sweep of planted errors: each is named, no equal run is said to differ, and it
can fail.
"""

from __future__ import annotations

import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo is tried on Linux")
def test_planted_errors_are_named_with_operator_line_step_and_rank() -> None:
    from maintenance.sweeps.plants import COMPILED, EAGER, PHASES, run

    outcome = run(eager=4, compiled=4, pairs=len(EAGER) + len(COMPILED), seed=3, seconds=400)
    assert outcome.missed == []
    assert outcome.alarms == []
    assert {phase for _, phase in outcome.kinds} == set(PHASES)
    assert set(outcome.pairs) == {*EAGER, "compiled"}


def test_another_place_is_a_miss() -> None:
    from maintenance.sweeps.plants import is_named

    planted = {
        "op": "1/relu",
        "phase": "forward",
        "source": "a.py:3",
        "step": 1,
        "process": "rank0",
    }
    named = {**planted, "cause": "operator"}
    assert is_named(planted, named)
    others = {"op": "2/relu", "source": "a.py:4", "step": 0, "process": "rank1", "cause": "outside"}
    for name, value in others.items():
        assert not is_named(planted, {**named, name: value})
    collective = {**planted, "phase": "collective"}
    for cause in ("outside", "writer"):
        assert is_named(collective, {**named, "cause": cause})
    others.update(cause="operator")
    for name, value in others.items():
        assert not is_named(collective, {**named, "cause": "outside", name: value})
