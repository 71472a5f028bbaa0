"""The benchmark program measures what it says; its figures are no test's business."""

from __future__ import annotations

import gc

import pytest

import bench
from bench_models import SUBJECTS, small_program
from bench_timing import Way, interleaved
from bench_tools import INTERCEPTORS, KINDS, Count, applied, unavailable


@pytest.mark.parametrize("training", [False, True])
def test_every_way_is_measured(training: bool) -> None:
    missing = unavailable()
    available = [name for name in INTERCEPTORS if name not in missing]
    assert available
    program = small_program(training)
    compared = bench.compare(
        SUBJECTS[0], training, available, 0.0, with_peers=False, program=program
    )

    plain = {"plain torch", "plain torch, again"}
    expected = {f"amanda {name}: {kind}" for name in available for kind in KINDS}
    assert compared.failed == {}
    assert set(compared.timings) == plain | expected
    assert compared.timings["plain torch"].ratio == 1
    for timing in compared.timings.values():
        assert timing.turns == 3
        assert timing.runs >= timing.turns
        assert timing.low <= timing.high
    assert gc.isenabled()


def test_counters_count_forward_and_backward() -> None:
    for name in set(INTERCEPTORS) - set(unavailable()):
        for counter in (Count("linear", backward=True), Count("linear", inputs=True)):
            with applied(name, counter)():
                small_program(training=True)()
            assert (counter.forward_runs, counter.backward_runs) == (2, 2)


def test_a_way_that_fails_is_reported_and_the_others_are_measured() -> None:
    def fail() -> None:
        raise ValueError("cannot run this")

    compared = interleaved([Way("works", int), Way("fails", fail)], 0.0, turn=1e-4)

    assert list(compared.timings) == ["works"]
    assert compared.failed == {"fails": "ValueError: cannot run this"}
