"""Overlapping times, lanes of a trace file, and attribution of kernels to operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, strategies as st

from amanda_tools.kit.output.chrome import lanes
from amanda_tools.latency.intervals import Overlapping
from amanda_tools.latency.kernels import join


def test_times_that_overlap() -> None:
    accounts: Overlapping[str] = Overlapping()
    first, second = "first", "second"
    accounts.enter(first, 10)
    accounts.enter(second, 15)
    accounts.enter(first, 17)
    accounts.enter("lost", 18)
    for what, end in ((first, 20), (second, 30), (first, 35)):
        accounts.leave(what, end)
    assert accounts.leave(first, 40) is None
    assert accounts.settle() == (25, ["lost"])
    accounts.enter(first, 50)
    accounts.leave(first, 51)
    assert accounts.settle() == (1, [])
    assert (accounts.busy, accounts.total) == (26, 10 + 15 + 18 + 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_spans_of_one_lane_nest(ends: list[tuple[int, int]]) -> None:
    spans = [(min(pair), max(pair)) for pair in ends]
    numbers = lanes(spans)
    for i, (start, end) in enumerate(spans):
        for j, (other_start, other_end) in enumerate(spans):
            if i != j and numbers[i] == numbers[j]:
                apart = end <= other_start or other_end <= start
                inside = start >= other_start and end <= other_end
                around = start <= other_start and end >= other_end
                assert apart or inside or around


def event(name: str, start: int, end: int, **facts: Any) -> Any:
    given = {"device": "CPU", "thread": 1, "id": 0, "linked": 0, "annotation": False, **facts}
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: start,
        end_ns=lambda: end,
        duration_ns=lambda: end - start,
        device_type=lambda: SimpleNamespace(name=given["device"]),
        device_index=lambda: 0,
        start_thread_id=lambda: given["thread"],
        correlation_id=lambda: given["id"],
        linked_correlation_id=lambda: given["linked"],
        is_user_annotation=lambda: given["annotation"],
    )


def test_kernels_are_joined_by_correlation_and_time() -> None:
    found = join(
        [
            event("amanda#3", 0, 100),
            event("amanda#5", 20, 40),
            event("amanda#7", 0, 50, thread=2),
            event("amanda#3", 200, 300),
            event("outer", 10, 15, id=11),
            event("inner", 25, 30, id=12),
            event("elsewhere", 25, 30, id=13, thread=2),
            event("after", 45, 47, id=14),
            event("outside", 150, 160, id=15),
            event("again", 250, 260, id=16),
            *(
                event(f"kernel {launcher}", 1000, 1007, device="CUDA", linked=launcher)
                for launcher in (11, 12, 13, 14, 15, 16, 99)
            ),
            event("amanda#3", 900, 1000, device="CUDA", annotation=True),
        ]
    )
    assert [kernel.op for kernel in found] == [3, 5, 7, 3, None, 3, None]
    assert {kernel.device for kernel in found} == {"CUDA:0"}
    assert {kernel.duration for kernel in found} == {7}
