"""Latency profiler: exact with a clock that the test controls; on PyTorch, devices and kernels.

Long, since it is a list of cases.
"""

from __future__ import annotations

import gzip
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core.results import HasResult, Result, share
from amanda_tools.flops import Flops
from amanda_tools.latency import Latency, LatencyResult, TimedOp
from amanda_tools.latency.device_events import EventPairs
from amanda_tools.latency.kernels import Kernel, join
from amanda_tools.latency.times import DRIVER, Samples

from ..profiling import MS, FakeClock, FakeEvent, checked_trace, latency_by


def sleeping(clock: FakeClock, forward: int, backward: int) -> Any:
    """Return an operator that takes a given time forward and backward."""

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            clock.sleep(forward)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            clock.sleep(backward)
            return gradient

    return Sleep.apply


def only(result: LatencyResult, type: str) -> TimedOp:
    (found,) = (op for op in result.ops if op.type == type)
    return found


def test_a_sleep_reads_what_it_sleeps() -> None:
    clock = FakeClock()
    sleep = sleeping(clock, 100 * MS, 40 * MS)
    tool = latency_by(clock)
    x = torch.ones(2, requires_grad=True)
    with amanda.apply(tool):
        for _ in range(3):
            sleep(x).sum().backward()
    found = tool.result()
    forward, backward = only(found, "Sleep"), only(found, "SleepBackward")
    assert (forward.calls, forward.total, forward.self) == (3, 300 * MS, 300 * MS)
    assert (forward.first, forward.shortest, forward.longest) == (100 * MS,) * 3
    assert (backward.calls, backward.total) == (3, 120 * MS)
    assert (backward.phase, backward.forward) == ("backward", forward.name)
    sums = found.by_type()["Sleep"]
    assert (sums.forward, sums.backward, sums.calls, sums.backward_calls) == (
        300 * MS,
        120 * MS,
        3,
        3,
    )
    assert found.total.self == 420 * MS
    assert found.graph_total == 0


def test_self_times_of_nested_operators() -> None:
    """Backward runs a checkpoint's operators again, inside a backward operator."""
    clock = FakeClock()
    inner = sleeping(clock, 7 * MS, 2 * MS)
    tool = latency_by(clock)
    x = torch.ones(2, requires_grad=True)
    with amanda.apply(tool):
        y = checkpoint(lambda z: inner(z).relu(), x, use_reentrant=False)
        clock.sleep(5 * MS)
        y.sum().backward()
    found = tool.result()
    sleep, relu = only(found, "Sleep"), only(found, "relu")
    assert (sleep.calls, sleep.self) == (2, 14 * MS)
    # The second time nothing of the ReLU's result is needed, and the checkpoint leaves it.
    assert (relu.calls, relu.unfinished) == (1, 1)
    outer = only(found, "ReluBackward0")
    assert (outer.total, outer.self) == (7 * MS, 0)
    assert only(found, "SleepBackward").self == 2 * MS
    assert found.total.self == 16 * MS
    assert "1 execution did not end" in found.notes[0]


def test_an_exception_leaves_the_other_times_right() -> None:
    clock = FakeClock()
    tool = latency_by(clock)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            clock.sleep(3 * MS)
            raise KeyError("the program's own")

    sleep = sleeping(clock, 10 * MS, 0)
    with amanda.apply(tool):
        with pytest.raises(KeyError, match="the program's own"):
            Fails.apply(torch.ones(2))  # type: ignore[no-untyped-call]
        sleep(torch.ones(2))
    found = tool.result()
    assert only(found, "Sleep").self == 10 * MS
    fails = only(found, "Fails")
    assert (fails.calls, fails.unfinished, fails.total) == (0, 1, 0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 2)))


def train(model: nn.Module, clock: FakeClock, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        clock.sleep(11)
        model(torch.ones(2, 4)).sum().backward()
        clock.sleep(13)
        optimizer.step()
        optimizer.zero_grad()


def test_the_times_of_a_step_add_up() -> None:
    """With a clock that moves at each look, so that each look must be in one account."""
    clock = FakeClock(tick=1)
    tool = latency_by(clock)
    with amanda.apply(tool):
        train(network(), clock)
    found = tool.result()
    assert len([step for step in found.steps if step.ended]) == 3
    assert sum(step.ops for step in found.steps) == found.total.self
    assert sum(step.calls for step in found.steps) == sum(op.calls for op in found.ops)
    assert sum(thread.self for thread in found.threads) == found.total.self
    for step in found.steps[:3]:
        # An operator is one look long, the tool two. From the tool's last look to the next
        # operator's first one passes one look, besides what the program sleeps.
        assert step.ops == step.calls
        assert step.tool == 2 * step.calls
        assert step.wall == step.ops + step.tool + step.rest
        assert 24 <= step.rest <= 24 + step.calls + 1
    assert sum(found.between.values()) == sum(step.rest for step in found.steps)
    assert round(found.tool_seconds * 1e9) == 2 * sum(step.calls for step in found.steps)


def steps_of(clock: FakeClock, times: list[int], **options: Any) -> LatencyResult:
    """Time steps in which an operator takes these times, and the program 3 ms beside it."""
    tool = latency_by(clock, **options)
    with amanda.apply(tool):
        for time in times:
            sleeping(clock, time * MS, 0)(torch.ones(2))
            clock.sleep(3 * MS)
            amanda.step()
    return tool.result()


def test_the_warm_up_is_left_out() -> None:
    found = steps_of(FakeClock(), [500, 10, 20], warmup=1)
    op = only(found, "Sleep")
    assert (op.calls, op.self, op.first) == (2, 30 * MS, 500 * MS)
    assert (op.shortest, op.longest) == (10 * MS, 20 * MS)
    assert [step.warm_up for step in found.steps] == [True, False, False]
    assert found.wall == 36 * MS
    assert found.by_module()[""].time == 36 * MS
    assert found.threads[0].self == 30 * MS
    assert "1 step of warm-up left out" in found.table().title
    # Alone it is better than nothing.
    alone = steps_of(FakeClock(), [500], warmup=1)
    assert (only(alone, "Sleep").self, alone.wall) == (500 * MS, 503 * MS)
    assert "without warm-up" in alone.table().title


def test_the_warm_up_ends_when_steps_are_alike() -> None:
    """The account is that of the same steps alone; the clock of the test says what each took."""
    found = steps_of(FakeClock(), [500, 80, 10, 20, 10], warmup=None)
    assert [step.warm_up for step in found.steps] == [True, True, False, False, False]
    op = only(found, "Sleep")
    assert (op.calls, op.self, op.total, op.first) == (3, 40 * MS, 40 * MS, 500 * MS)
    assert (op.shortest, op.longest, op.median) == (10 * MS, 20 * MS, 10 * MS)
    assert (found.wall, found.threads[0].self) == (49 * MS, 40 * MS)
    assert sum(found.between.values()) == 9 * MS
    assert "2 steps of warm-up left out" in found.table().title
    # A later step that takes long is not a warm-up, nor is the only step.
    late = steps_of(FakeClock(), [50, 10, 10, 10, 400, 10], warmup=None)
    assert [step.warm_up for step in late.steps] == [True] + [False] * 4  # Without step 5.
    alone = steps_of(FakeClock(), [500], warmup=None)
    assert (only(alone, "Sleep").self, alone.wall) == (500 * MS, 503 * MS)


def test_steps_in_which_tools_analyse_again_are_left_out() -> None:
    """The accounts of the others are theirs alone: each takes another time."""
    times = [1000 if n in (0, 9, 24) else n + 1 for n in range(30)]
    found = steps_of(FakeClock(), times, warmup=None)
    without = {0, *range(5, 9), 9, *range(20, 24), 24}
    counted = [n for n in range(30) if n not in without]
    assert [step.number for step in found.counted] == counted
    op = only(found, "Sleep")
    expected = [times[n] * MS for n in counted]
    assert (op.calls, op.self, op.total) == (len(counted), sum(expected), sum(expected))
    assert (op.shortest, op.longest, op.first) == (2 * MS, 30 * MS, 1000 * MS)
    assert op.median == statistics.median_low(expected)
    assert (found.threads[0].calls, found.threads[0].self) == (2 * len(counted), sum(expected))
    assert found.wall == sum(expected) + 3 * MS * len(counted)
    assert sum(found.between.values()) == sum(step.rest + step.driver for step in found.counted)
    everything = steps_of(FakeClock(), times, warmup=0)
    assert only(everything, "Sleep").longest == 1000 * MS


def test_rankings_are_by_medians() -> None:
    clock = FakeClock()
    tool = latency_by(clock)
    slow_once, steady = sleeping(clock, 0, 0), sleeping(clock, 7 * MS, 0)
    with amanda.apply(tool):
        for step in range(4):
            clock.sleep(0)
            slow_once(torch.ones(1))
            (sleeping(clock, (100 if step == 2 else 2) * MS, 0))(torch.ones(1)).relu()
            steady(torch.ones(1)).abs()
            amanda.step()
    found = tool.result()
    totals = {op.name: op.self for op in found.ops if op.self}
    assert sorted(totals.values()) == [28 * MS, 106 * MS]
    first = found.table("op").rows[len(found.table("op").rows) - len(found.ops)]
    assert first[1] == 28.0  # Four times 7 ms: the other one was slow once.
    chosen = max(found.ops, key=lambda op: op.typical)
    assert (chosen.median, chosen.typical) == (7 * MS, 28 * MS)
    (figures, *_) = json.loads(found.to_json())["charts"]
    assert figures["items"][-1]["op"] == chosen.name


def test_a_sentence_says_what_to_do() -> None:
    between = steps_of(FakeClock(), [1, 1])  # 3 ms of 4 ms are the program's.
    assert between.advice == (
        "75% of a step is between operators: use larger batches, `torch.compile`"
    )
    assert between.advice in between.table().title
    inside = steps_of(FakeClock(), [27, 27])
    assert inside.advice.startswith("90% of a step is in operators, 100% of that in Sleep: ")
    share({"latency": between, "flops": Flops().result()})
    assert between.advice == ""  # The time between operators is also that of the other tool.
    assert latency_by(FakeClock()).result().advice == ""


def test_the_driver_s_time_is_its_own_in_the_module_tree() -> None:
    clock = FakeClock(tick=1 * MS)
    found = steps_of(clock, [10, 10, 10, 10, 10, 90, 40, 10, 10, 10, 10], warmup=1)
    assert [step.number for step in found.plain_steps] == [5, 6, 7, 8]
    driver = sum(step.driver for step in found.counted)
    assert driver > 0
    assert found.between[DRIVER] == driver
    tool, wall = sum(step.tool for step in found.counted), found.wall
    assert found.by_module()[""].time == wall - tool
    assert DRIVER in [row[0] for row in found.table("module").rows]
    rows = [row[0] for row in found.table("step").rows]
    assert rows[4:8] == [4, *(f"{number} (without the profiler)" for number in (5, 6, 7))]
    assert "as steps 5, 6, 7, 8 say" in found.table().title


def test_one_base_for_title_tiles_and_table() -> None:
    """Operators after the last step count everywhere, and only medians are without them."""
    clock = FakeClock()
    tool = latency_by(clock)
    with amanda.apply(tool):
        for time in (10, 10, 70):
            sleeping(clock, time * MS, 0)(torch.ones(2))
            clock.sleep(10 * MS)
            if time == 10:
                amanda.step()
    found = tool.result()
    (all_of_it, between, *_) = found.table().rows
    assert all_of_it[1] == 110.0
    assert between[2] == "18.2%"
    assert "81.8% of 110.000 ms in 2 steps and what followed; 18.2% between" in found.table().title
    items = {item["label"]: item for item in json.loads(found.to_json())["charts"][0]["items"]}
    assert round(items["in operators"]["value"], 3) == 0.818
    assert items["a step, median"]["value"] == 20 * MS


def test_steps_without_the_profiler_say_what_it_takes() -> None:
    clock = FakeClock(tick=1 * MS)
    # 5 to 8 are such steps. The first two of them still have something of the profiler.
    found = steps_of(clock, [10, 10, 10, 10, 10, 90, 40, 10, 10, 10, 10], warmup=1)
    assert [step.number for step in found.steps] == [0, 1, 2, 3, 4, 9, 10]
    # In step 9, tools analyse again.
    assert [step.number for step in found.counted] == [1, 2, 3, 4, 10]
    assert only(found, "Sleep").calls == 5
    assert found.plain == 14 * MS  # And one look at the clock.
    step = found.counted[0]
    assert (step.driver, step.wall) == (step.wall - step.tool - 14 * MS, step.wall)
    assert step.rest + step.ops + step.tool + step.driver == step.wall
    assert "a step takes 14.000 ms without it" in found.table().title
    short = steps_of(clock, [10] * 4)
    assert short.plain is None
    assert "what the driver takes to call it, which is not known" in short.table().title


def test_operators_take_no_longer_than_a_step_without_the_profiler() -> None:
    # The operator takes 10 ms with the routines around it, and 2 ms without.
    found = steps_of(FakeClock(tick=1000), [10] * 5 + [2] * 4 + [10, 12], warmup=1)
    assert found.plain == 5 * MS + 1000
    inside = 5 * MS  # 10 ms and a tick, less the plain step
    steps = [(step.ops, step.driver >= inside, step.rest >= 0) for step in found.counted]
    assert steps == [(5 * MS + 1000, True, True)] * 4 + [(7 * MS + 1000, True, True)]
    assert only(found, "Sleep").self == sum(step.ops for step in found.counted)
    assert found.threads[0].self == sum(step.ops for step in found.counted)
    assert only(found, "Sleep").median == 10 * MS + 1000  # The intervals are as they were.
    for step in found.steps:
        assert step.ops + step.rest + step.tool + step.driver == step.wall


def test_noise_is_not_subtracted_from_operators() -> None:
    # The median of the timed steps exceeds the mean of the two others, but not each of the first
    # exceeds each of the others.
    times = [10, 30, 30, 30, 30, 10, 10]
    found = steps_of(FakeClock(), [500, *times[:4], 0, 0, 2, 9, *times[4:]], warmup=1)
    assert found.plain == 8.5 * MS  # With the 3 ms of the program.
    counted = [*times[:4], *times[5:]]  # Without the step in which tools analyse again.
    assert only(found, "Sleep").self == sum(counted) * MS
    assert [step.ops for step in found.counted] == [time * MS for time in counted]


def test_percentiles_of_many_executions() -> None:
    times = [*range(1, 2001)]
    samples = Samples()
    for time in times:
        samples.add(time)
    middle, last, spread = samples.quantiles()
    quarters = statistics.quantiles(times, n=20)
    for measured, expected in (
        (middle, quarters[9]),
        (last, quarters[18]),
        (spread, quarters[14] - quarters[4]),
    ):
        assert measured == pytest.approx(expected, rel=0.02)
    found = steps_of(FakeClock(), [1, 2, 3, 4])
    op = only(found, "Sleep")
    assert op.median in (2 * MS, 3 * MS)
    assert (op.p95, op.spread) == (4 * MS, 1 * MS)


def test_other_tools_are_named() -> None:
    found = steps_of(FakeClock(), [1, 2])
    share({"latency": found, "flops": Flops().result(), "other": object()})
    assert "includes the time of other tools: flops, other" in found.table().title


def test_the_times_of_modules_add_up() -> None:
    """Each stretch between two operators is the module's that holds both."""
    clock = FakeClock()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            clock.sleep(3 * MS)  # Between two operators of this module.
            x = x + 1
            clock.sleep(5 * MS)  # Between one of it, and one of a module inside.
            hidden: torch.Tensor = self.inner(x)
            return hidden

    model: Any = nn.Sequential(Slow())
    model[0].inner[1].register_forward_hook(lambda *_: clock.sleep(7 * MS))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, 4)
    tool = latency_by(clock)
    with amanda.apply(tool):
        for _ in range(2):
            loss = model(x).sum()
            clock.sleep(11 * MS)
            loss.backward()
            clock.sleep(13 * MS)
            optimizer.step()
    found = tool.result()
    between = {module: time for module, time in found.between.items() if time}
    assert between == {"": 2 * 24 * MS, "0": 2 * 8 * MS, "0.inner": 2 * 7 * MS}
    assert sum(between.values()) == sum(step.rest for step in found.steps)
    modules = found.by_module()
    assert [modules[name].between for name in ("", "0", "0.inner")] == [78 * MS, 30 * MS, 14 * MS]
    rows = {row[0]: row for row in found.table("module").rows}
    assert (rows["(all)"][1], rows["0"][1], rows["(no module)"][1]) == (78, 30, 48)
    assert rows["0"][2] == "38.5%"


@pytest.mark.parametrize("by", ["type", "op"])
def test_a_table_adds_up_to_the_wall_time(by: Any) -> None:
    """In eager programs: each look at the clock takes a millisecond."""
    clock = FakeClock(tick=MS)
    tool, model = latency_by(clock), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with amanda.apply(tool):
        for _ in range(2):
            loss = model(torch.ones(2, 4)).sum()
            clock.sleep(500 * MS)
            loss.backward()
            optimizer.step()
    found = tool.result()
    rows: Any = {row[0]: row for row in found.table(by).rows}
    assert list(rows)[:3] == ["(all)", "(between operators)", "(profiler)"]
    assert rows["(all)"][1] == found.wall / MS == sum(s.wall for s in found.steps) / MS
    assert rows["(between operators)"][1] == sum(found.between.values()) / MS > 2 * 500
    # Each of the executions takes one look to the next, and the profiler two for it.
    calls = sum(step.calls for step in found.steps)
    assert rows["(profiler)"][1] == 2 * calls
    parts: list[Any] = [row[1] for row in found.table(by).rows[1:]]
    assert sum(parts) == rows["(all)"][1]
    assert sum(parts[2:]) == calls
    assert rows["(all)"][2] == "100.0%"


def test_modules_and_zones() -> None:
    clock = FakeClock(tick=1)
    tool, less = latency_by(clock), latency_by(clock, everything=False, backward=False)
    with amanda.apply(tool, less):
        train(network(), clock)
    found, only_forward = tool.result(), less.result()
    modules = found.by_module()
    assert modules[""].self == found.total.self
    assert modules["2"].self == modules["2.0"].self
    assert modules["2.0"].backward_calls > 0
    assert {op.zone for op in found.ops} == {"init", "model", "optimizer"}
    assert {(op.zone, op.phase) for op in only_forward.ops} == {("model", "forward")}
    assert only_forward.total.backward_calls == 0


def test_what_is_selected_is_timed() -> None:
    tool = Latency().where(amanda.select(op="relu", steps=[1]))
    x = torch.ones(2, requires_grad=True)
    with amanda.apply(tool):
        for _ in range(3):
            total: Any = x.exp().relu().sum()
            total.backward()
            amanda.step()
    found = tool.result()
    assert {op.type: op.calls for op in found.ops} == {"relu": 1, "ReluBackward0": 1}
    assert [step.number for step in found.steps] == [1]


def test_a_trace_file(tmp_path: Path) -> None:
    clock = FakeClock(tick=700)
    tool = latency_by(clock)
    with amanda.apply(tool):
        x = torch.ones(2, requires_grad=True)
        checkpoint(lambda z: z.exp().sin(), x, use_reentrant=True).sum().backward()
    found = tool.result()
    (path,) = found.write(tmp_path)
    events = checked_trace(path)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(op.calls for op in found.ops)
    exp = [event for event in spans if event["name"] == "exp"]
    assert [event["dur"] for event in exp] == [0.7, 0.7]  # Microseconds.
    assert exp[0]["args"]["source"].startswith("test_latency.py:")
    assert {event["cat"] for event in spans} == {"forward", "backward"}
    named = {event["tid"] for event in events if event["ph"] == "M"}
    assert {event["tid"] for event in spans} <= named


def test_a_large_trace_file_is_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Latency()
    with amanda.apply(tool):
        torch.ones(2).exp()
    (plain,) = tool.result().write(tmp_path)
    content = plain.read_bytes()
    monkeypatch.setattr("amanda_tools.kit.output.chrome._LARGE", len(content) - 1)
    (compressed,) = tool.result().write(tmp_path)
    assert (plain.name, compressed.name) == ("trace.json", "trace.json.gz")
    assert gzip.decompress(compressed.read_bytes()) == content
    assert not plain.exists()  # Nobody takes the earlier file for this one.


def test_a_limit_of_the_trace_file() -> None:
    tool = Latency(limit=2)
    with amanda.apply(tool):
        for _ in range(5):
            torch.ones(2)
    found = tool.result()
    assert (len(found.spans), found.left_out, only(found, "ones").calls) == (2, 3, 5)
    with pytest.raises(ValueError, match="limit must not be negative"):
        Latency(limit=-1)


# Devices, whose events are the test's.


class FakeEvents:
    """A device whose clock the test moves; it has completed its work when it is waited for."""

    def __init__(self) -> None:
        self.clock = 0
        self.made: list[FakeEvent] = []
        self.synchronized: list[str] = []
        self.recorded: list[FakeEvent] = []

    def make(self) -> FakeEvent:
        self.made.append(FakeEvent())
        return self.made[-1]

    def record(self, event: FakeEvent, device: str) -> str:
        event.time, event.done = self.clock, False
        self.recorded.append(event)
        return f"{device} stream 0"

    def synchronize(self, device: str) -> None:
        self.synchronized.append(device)
        self.finish()

    def finish(self) -> None:
        for event in self.recorded:
            event.done = True


def test_pairs_of_events_nest_and_wait_once() -> None:
    events = FakeEvents()
    pairs = EventPairs(events)
    heard: dict[str, tuple[int, int, int]] = {}

    def read(name: str) -> Any:
        return lambda *times: heard.update({name: times})

    outer = pairs.begin("cuda:0")
    events.clock += 2 * MS
    inner = pairs.begin("cuda:0", outer)
    other = pairs.begin("cuda:1", outer)
    events.clock += 5 * MS
    pairs.end(other, read("other"))
    pairs.end(inner, read("inner"))
    events.clock += 1 * MS
    pairs.end(outer, read("outer"))
    assert heard == {}
    assert events.synchronized == []
    pairs.finish()
    assert sorted(events.synchronized) == ["cuda:0", "cuda:1"]
    assert heard == {
        "inner": (2 * MS, 5 * MS, 5 * MS),
        "other": (0, 5 * MS, 5 * MS),
        "outer": (0, 8 * MS, 3 * MS),
    }


def test_events_are_used_again() -> None:
    events = FakeEvents()
    pairs = EventPairs(events, waiting=10)
    count = 0

    def read(*times: int) -> None:
        nonlocal count
        count += 1

    for _ in range(1000):
        pairs.end(pairs.begin("cuda:0"), read)
        events.finish()
    assert len(events.made) <= 30
    assert events.synchronized == []
    pairs.finish()
    assert count == 1000


def test_operators_on_a_device() -> None:
    """Times of a device that is the CPU in disguise."""
    events = FakeEvents()
    clock = FakeClock()
    kind: Any = type(
        "Latency",
        (Latency,),
        {
            "now": staticmethod(clock),
            "events": staticmethod(lambda: events),
            "asynchronous": frozenset({"cpu"}),
        },
    )
    tool = kind()

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            events.clock += 4 * MS
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            events.clock += 9 * MS
            return gradient

    work: Any = Work.apply
    x = torch.ones(2, requires_grad=True)
    with amanda.apply(tool):
        work(work(x)).sum().backward()
    assert events.synchronized == []
    found = tool.result()
    assert events.synchronized == ["cpu"]
    assert sum(op.device_self for op in found.ops if op.type == "Work") == 8 * MS
    assert sum(op.device_self for op in found.ops if op.type == "WorkBackward") == 18 * MS
    assert found.total.device == 26 * MS
    assert {span.track for span in found.spans} == {"MainThread", "cpu stream 0"}
    assert "device ms" in found.table("op").columns


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_operators_on_cuda() -> None:
    tool = Latency()
    x = torch.rand(512, 512, device="cuda")
    with amanda.apply(tool):
        for _ in range(10):
            x @ x
    found = tool.result()
    product = only(found, "matmul")
    assert product.device == "cuda:0"
    assert product.device_total > 0


# Kernels, by PyTorch's profiler.


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of PyTorch 2.11
def test_ranges_in_a_profile_of_the_program() -> None:
    """Each operator of ATen inside of an op's range belongs to that op; the leaves stand in."""
    tool = Latency(kernels=True)
    x = torch.rand(8, 8, requires_grad=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, amanda.apply(tool):
        total: Any = (x @ x).relu().sum()
        total.backward()
    result = tool.result()
    assert "the program has a profiler of its own" in result.notes[0]
    results: Any = profile.profiler
    leaves = join(results.kineto_results.events(), leaves=True)
    names = {op.type: number for number, op in enumerate(result.ops)}
    by_op: dict[Any, set[str]] = {}
    for leaf in leaves:
        by_op.setdefault(leaf.op, set()).add(leaf.name)
    assert "aten::clamp_min" in by_op[names["relu"]]
    assert "aten::threshold_backward" in by_op[names["ReluBackward0"]]
    assert "aten::threshold_backward" not in by_op[names["relu"]]
    assert "aten::as_strided" in by_op[names["SumBackward0"]]


def test_no_profiler_runs_once_the_tool_is_no_longer_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activities = {torch.profiler.ProfilerActivity.CPU}
    monkeypatch.setattr("amanda_tools.latency.kernels.device_activities", lambda: activities)
    tool = Latency(kernels=True)
    with amanda.apply(tool):
        torch.ones(2).relu()
    with torch.profiler.profile() as profile:  # PyTorch refuses a second one.
        torch.ones(2).neg()
    assert "aten::neg" in {event.key for event in profile.key_averages()}
    assert [op.type for op in tool.result().ops] == ["ones", "relu"]


@pytest.mark.slow
def test_a_process_ends_well_though_nobody_asked_for_the_result() -> None:
    # PyTorch crashes if its profiler runs when the process ends.
    program = (
        "import torch, amanda; from amanda_tools.latency import Latency; "
        "handle = amanda.attach(Latency(kernels=True)); torch.ones(2).relu()"
    )
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0


def test_a_profile_of_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Latency(kernels=True)
    activities = {torch.profiler.ProfilerActivity.CPU}
    monkeypatch.setattr("amanda_tools.latency.kernels.device_activities", lambda: activities)
    monkeypatch.setattr("amanda_tools.latency.kernels.join", partial(join, leaves=True))
    x = torch.ones(8, requires_grad=True)
    with amanda.apply(tool):
        for _ in range(3):
            total: Any = x.exp().sum()
            total.backward()
    found = tool.result()
    assert not torch.autograd.profiler._is_profiler_enabled
    assert only(found, "exp").kernels == 3
    assert only(found, "ExpBackward0").kernel_time > 0
    # Each belongs to one operator, or to none, and then it is said.
    nowhere = [kernel for kernel in found.kernels if kernel.op is None]
    several = "s" * (len(nowhere) != 1)
    assert f"{len(nowhere)} kernel{several} started outside timed operators" in found.notes
    whole = sum(kernel.duration for kernel in found.kernels)
    assert whole == found.total.kernel_time + sum(kernel.duration for kernel in nowhere)
    rows: Any = found.table("kernel").rows
    assert ("aten::exp", "exp") in [row[:2] for row in rows]
    assert "kernel ms" in found.table("type").columns


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_on_cuda_add_up_to_those_of_kineto(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def recording(found: Any) -> list[Kernel]:
        events.extend(found)
        return join(events)

    monkeypatch.setattr("amanda_tools.latency.kernels.join", recording)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 5)).cuda()
    x = torch.rand(4, 3, 32, 32, device="cuda")
    tool = Latency(kernels=True)
    with amanda.apply(tool):
        for _ in range(3):
            model(x).sum().backward()
    found = tool.result()
    on_device = [event for event in events if event.device_type().name == "CUDA"]
    whole = sum(event.duration_ns() for event in on_device if not event.is_user_annotation())
    # The engine fills the gradient of each loss with ones before the first operator.
    nowhere = [kernel for kernel in found.kernels if kernel.op is None]
    assert len(nowhere) == 3
    assert all("Fill" in kernel.name for kernel in nowhere)
    assert whole > 0
    filled = sum(kernel.duration for kernel in nowhere)
    assert found.total.kernel_time + filled == pytest.approx(whole, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_are_no_kernels() -> None:
    tool = Latency(kernels=True)
    with amanda.apply(tool):
        torch.ones(2).exp()
        assert not torch.autograd.profiler._is_profiler_enabled  # A profile grows with the program.
    assert tool.result().kernels == []
    assert tool.result().notes == []


# Forms.


def test_the_result_has_all_forms(tmp_path: Path) -> None:
    clock = FakeClock(tick=1)
    tool = latency_by(clock)
    assert isinstance(tool, HasResult)
    assert tool.result().table().rows == []
    with amanda.apply(tool):
        train(network(), clock)
    found = tool.result()
    assert isinstance(found, Result)
    read = json.loads(found.to_json())
    assert read["format"] == "amanda.latency/1"
    assert [TimedOp(**op) for op in read["ops"]] == found.ops
    assert read["total"]["forward"] == found.total.forward
    assert [row[0] for row in found.table("module", depth=1).rows] == [
        "(all)",
        *"012",
        "(no module)",
    ]
    rows: Any = {row[0]: row for row in found.table("type").rows}
    assert rows["linear"][4] == found.by_type()["linear"].calls == 6
    assert len(found.table("op").rows) == 3 + len(found.ops)
    assert len(found.table("step").rows) == len(found.steps)
    assert found.table("thread").rows[0][0] == "MainThread"
    assert "timing took" in found.table().title
    assert "<td>linear</td>" in found._repr_html_()
    wrong: Any = "place"
    with pytest.raises(ValueError, match="by must be"):
        found.table(wrong)


@pytest.mark.slow
def test_for_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    clock = FakeClock(tick=1)
    tool = latency_by(clock)
    with amanda.apply(tool):
        train(network(), clock)
    found = tool.result()
    found.write_tensorboard(tmp_path)
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    tags = accumulator.Tags()
    tag = "step/wall_ms"
    assert tag in tags["tensors"] + tags["scalars"]
    events = accumulator.Tensors(tag)
    assert [item.step for item in events] == [step.number for step in found.steps]
    values = [item.tensor_proto.float_val[0] for item in events]
    assert values == pytest.approx([step.wall / 1e6 for step in found.steps])


@pytest.mark.slow
def test_as_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    tool = Latency()
    with amanda.apply(tool):
        torch.ones(2)
    frame = tool.result().to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["calls"]) == [1]


def test_nothing_is_changed() -> None:
    torch.manual_seed(0)
    model, x = network(), torch.rand(2, 4, requires_grad=True)
    plain = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    tool = Latency(kernels=True)
    with amanda.apply(tool):
        timed = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    tool.result()
    assert all(torch.equal(one, other) for one, other in zip(plain, timed, strict=True))
