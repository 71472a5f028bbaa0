"""Graphs of devices: recordings and replays that no tool sees, with the notice that says so."""

# mypy: allow-untyped-calls
# torch leaves Stream untyped.

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_driver_torch.interception.device_graphs import kinds
from amanda_driver_torch.threads.state import STATE

NOTICE = "CUDA graphs and those of other devices are not instrumented"
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Doubling(amanda.Tool):
    """Doubles the result of each operator, and counts the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.seen.append(context.op_type)
        context.insert_after_op(lambda value: value * 2)


@pytest.fixture(params=kinds(), ids=lambda kind: kind.__name__)
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a class of torch, with methods that do nothing on a machine without a device."""
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(request.param, name, lambda *args: None)
    return request.param


def test_the_classes_that_torch_documents_are_known() -> None:
    assert torch.cuda.CUDAGraph in kinds()
    if hasattr(torch.accelerator, "Graph"):
        assert torch.accelerator.Graph in kinds()


def test_operators_in_a_recording_are_not_seen(recorder: Any) -> None:
    before = dict(vars(recorder))
    tool, x = Doubling(), torch.ones(2)

    def run() -> list[torch.Tensor]:
        recorder.capture_begin(None)
        found = [x.relu()]
        recorder.capture_end(None)
        found.append(x.sigmoid())
        recorder.replay(None)
        return found

    with warnings.catch_warnings(record=True) as told, amanda.apply(tool) as handle:
        warnings.simplefilter("always")
        inside, outside = run()
        gaps = {gap.what for gap in handle.coverage()["pytorch"]}
    assert "CUDA graphs and those of other devices" in gaps
    assert len([warning for warning in told if NOTICE in str(warning.message)]) == 1
    assert tool.seen == ["sigmoid"]
    assert inside.equal(x)
    assert outside.equal(2 * x.sigmoid())
    assert dict(vars(recorder)) == before


def test_replays_alone_give_the_notice(recorder: Any) -> None:
    with pytest.warns(amanda.AmandaWarning, match=NOTICE), amanda.apply(Doubling()):
        recorder.replay(None)


def test_nothing_is_said_where_no_tool_sees(recorder: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amanda.apply(Doubling()), amanda.disabled():
            recorder.replay(None)
        recorder.replay(None)


def test_apply_may_end_in_a_recording(recorder: Any) -> None:
    with pytest.warns(amanda.AmandaWarning, match=NOTICE), amanda.apply(Doubling()):
        recorder.capture_begin(None)
    assert STATE.quiet == STATE.recordings == 0
    recorder.capture_end(None)
    assert STATE.quiet == STATE.recordings == 0
    tool = Doubling()
    with amanda.apply(tool):
        torch.ones(2).relu()
    assert tool.seen == ["ones", "relu"]


@on_cuda
@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_a_recorded_training_step_computes_what_it_does_without_tools() -> None:
    def train(tool: amanda.Tool | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
        static = torch.randn(8, 16, device="cuda")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with amanda.apply(tool) if tool else amanda.disabled():
            with torch.cuda.stream(side):
                for _ in range(3):
                    model.zero_grad(set_to_none=True)
                    model(static).square().mean().backward()
            side.synchronize()
            model.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                loss = model(static).square().mean()
                loss.backward()
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            static.copy_(torch.randn(8, 16))
            graph.replay()
            found += [
                loss.clone(),
                *(p.grad.clone() for p in model.parameters() if p.grad is not None),
            ]
        return found

    plain, instrumented = train(None), train(Doubling())
    assert len(plain) == len(instrumented) == 15
    assert all(a.equal(b) for a, b in zip(plain, instrumented, strict=True))
