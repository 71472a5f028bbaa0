"""The benchmark program measures what it claims; its figures are not tested."""

from __future__ import annotations

import gc
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from maintenance.benchmarks import (
    bench,
    bench_callgrind,
    instructions_bench,
    operator_kinds,
    operators_bench,
    peers_bench,
    peers_ways,
    tools_bench,
)
from maintenance.benchmarks.bench_models import SUBJECTS, small_program
from maintenance.benchmarks.bench_timing import Way, interleaved
from maintenance.benchmarks.bench_tools import INTERCEPTORS, KINDS, Count, applied, unavailable

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


def test_every_shipped_tool_is_measured_warm_and_one_shot() -> None:
    points = entry_points(group="amanda.tools")
    shipped = {point.name for point in points if point.value.startswith("amanda_tools.")}
    assert shipped == set(tools_bench.TOOLS)
    step = small_program(training=True)
    for once in (False, True):
        assert tools_bench.measure("small", sorted(shipped), 1, step, once).keys() == shipped


@pytest.mark.parametrize(
    ("task", "ways"),
    [
        ("outputs", ["amanda `capture`", "forward hooks"]),
        ("finite", ["amanda `nonfinite`", "hooks of modules"]),
        ("prune", ["amanda `prune`", "torch.nn.utils.prune"]),
    ],
)
def test_other_ways_find_the_same(
    task: str, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = SUBJECTS[0]
    for name in ("ONCE", "WARM", "STEPS"):
        monkeypatch.setattr(peers_bench, name, 1)
    found = [
        peers_bench.measure(subject.name, peers_ways.TASKS[task], way)["found"] for way in ways
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
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


def test_instructions_are_read_from_callgrinds_dumps(tmp_path: Path) -> None:
    runs = instructions_bench.COUNTED
    counted = {"plain torch": 2_000_000, "a tool": 2_100_000}
    for number, (way, instructions) in enumerate(counted.items()):
        (tmp_path / f"counts.{number + 1}").write_text(
            "# callgrind format\nversion: 1\npid: 7\n\n"
            f"desc: Trigger: Client Request: BERT; forward; {way}\n\nevents: Ir\n\n"
            f"totals: {instructions * runs}\n"
        )
    # One more is written when the process ends, and has no name.
    (tmp_path / "counts.3").write_text("desc: Trigger: Program termination\n\ntotals: 12\n")

    counts = instructions_bench.by_way(bench_callgrind.collected(tmp_path))

    assert counts == {
        ("BERT", "forward", "plain torch"): 2_000_000,
        ("BERT", "forward", "a tool"): 2_100_000,
    }
    page = instructions_bench.report(counts)
    assert "|  | forward (2.00 million) |" in page
    assert "| a tool | 1.050 |" in page


def test_costs_of_an_operator_are_those_beyond_a_tool_that_inserts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {"relu": operator_kinds.KINDS["relu"], "arange": operator_kinds.KINDS["arange"]}
    monkeypatch.setattr(operators_bench, "KINDS", kinds)
    calls, counts = operators_bench.CALLS, {}
    ways = {str(operators_bench.baseline(way)): way for way in operators_bench.COLUMNS.values()}
    firsts = {operators_bench.FIRST: 90, operators_bench.MASKED: 120}
    for kind in kinds:
        for name, (part, *_) in (ways | operators_bench.COLUMNS).items():
            for run in range(operators_bench.COUNTED):
                is_step = kind == "relu" and part == operators_bench.STEP
                inserted = 0 if name in ways else 7 * calls
                counts[f"{kind}; {name}; run {run}"] = 1000 + 500 * is_step + inserted
        counts[f"{kind}; plain; first"] = 1000
        for way, more in firsts.items():
            counts[f"{kind}; {way}; first"] = 1000 + more * calls

    found = operators_bench.costs(list(kinds), counts)

    forward = [n for n, way in operators_bench.COLUMNS.items() if way[0] == operators_bench.FORWARD]
    assert found["arange"] == dict.fromkeys(forward, 7) | firsts
    assert found["relu"] == dict.fromkeys(operators_bench.COLUMNS, 7) | firsts
    assert "| arange | 7 | 7 | 7 | 7 | — | — | — | — | 90 | 120 |" in operators_bench.report(found)
