"""Graphs of devices: what a recording has of tools, and what replays are without them.

A recorder that notes operators and runs them again stands for a device.
"""

# mypy: allow-untyped-calls
# torch leaves Stream untyped.

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amanda
from amanda_core.interface import UnsupportedError
from amanda_driver_torch.interception.device_graphs import kinds
from amanda_driver_torch.threads.recordings import ACTIVE
from amanda_driver_torch.threads.state import STATE, call_quietly
from amanda_tools.nonfinite import NonFinite
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

NOTICE = "CUDA graphs and those of other devices are"
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Operators(TorchDispatchMode):
    """Notes the operators that run, which can then run again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def again(self) -> None:
        for function, args, kwargs, result in self.calls:
            new = function(*args, **kwargs)
            for one, other in zip(tree_leaves(result), tree_leaves(new), strict=True):
                if isinstance(one, torch.Tensor) and one.data_ptr() != other.data_ptr():
                    one.copy_(other)


class Halving(amanda.Tool):
    """Halves weights of linear layers and gradients of their outputs, and looks at everything."""

    def __init__(self, half: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.half = half or amanda.staged(lambda value: value * 0.5)
        self.seen: list[str] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        self.seen.append(context.name)
        if context["type"] == "linear":
            context.insert_before_op(self.half, inputs=[1])
            context.insert_before_backward_op(self.half, grad_outputs=[0])
        context.insert_after_op(self.look, observe=True)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.look, observe=True)

    def look(self, *values: Any) -> None:
        self.seen.append("look")


class Doubling(amanda.Tool):
    """Doubles the result of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(lambda context: context.insert_after_op(lambda value: value * 2))


@pytest.fixture(params=kinds(), ids=lambda kind: kind.__name__)
def graph(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a graph of a class of torch, whose methods note operators and run them again."""
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    running = Operators()
    for name, method in {
        "capture_begin": lambda _: running.__enter__(),
        "capture_end": lambda _: running.__exit__(None, None, None),
        "replay": lambda _: call_quietly(running.again),
    }.items():
        monkeypatch.setattr(request.param, name, method)
    kind = request.param
    # Without its initialization, which needs a device.
    new = (vars(one).get("__new__") for one in kind.__mro__)
    return next(one for one in new if isinstance(one, BuiltinFunctionType))(kind)


@contextmanager
def recorded(graph: Any) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


@contextmanager
def refused(graph: Any) -> Iterator[None]:
    match = "cannot edit what a graph"
    with pytest.raises(UnsupportedError, match=match) as error, recorded(graph):
        yield
    assert "amanda.staged" in str(error.value)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def step(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients of a step; gradients are added where they are."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    y = net(x)
    y.sum().backward()
    return [y, *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    assert len(found) == len(wanted) == 5
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_classes_that_torch_documents_are_known() -> None:
    assert torch.cuda.CUDAGraph in kinds()
    if hasattr(torch.accelerator, "Graph"):
        assert torch.accelerator.Graph in kinds()


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
@pytest.mark.parametrize(
    "make",
    [
        Halving,
        lambda: Prune(0.5),
        lambda: Quantize(activations="none"),
        lambda: Quantize(method="dynamic"),
        lambda: Quantize(calibration=3),
    ],
    ids=["halving", "prune", "weights", "dynamic", "calibrated"],
)
def test_staged_routines_are_recorded_and_end_with_apply(graph: Any, make: Any) -> None:
    net, x, tool = network(), torch.randn(2, 4), make()
    before = dict(vars(type(graph)))
    with amanda.apply(tool):
        for _ in range(3):
            step(net, x)
        if isinstance(tool, Quantize):
            tool.freeze()
        step(net, x)
        with recorded(graph):
            found = step(net, x)
        for scale in (1.0, -2.0):
            with torch.no_grad():
                x.copy_(torch.randn(2, 4) * scale)
                net[0].weight.mul_(scale)  # type: ignore[operator]
            graph.replay()
            kept = [one.clone() for one in found]
            assert equal(kept, step(net, x))
            with amanda.disabled():
                graph.replay()
                assert equal([one.clone() for one in found], step(net, x))
    graph.replay()
    kept = [one.clone() for one in found]
    assert equal(kept, step(net, x))
    assert dict(vars(type(graph))) == before
    assert not ACTIVE
    assert not STATE.recordings


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_a_recording_computes_with_weights_as_they_are(graph: Any) -> None:
    net, x = network(), torch.randn(2, 4)
    with torch.no_grad(), amanda.apply(Prune(0.5)):
        wanted = [net(x) for _ in range(3)][-1].clone()  # The pruned weights are kept.
        with recorded(graph):
            found = net(x)
        for parameter in net[2].parameters():
            call_quietly(parameter.mul_, 3)
        graph.replay()
        assert torch.allclose(found, 3 * wanted)
        assert not torch.allclose(found, wanted)
        assert torch.equal(found.clone(), net(x))


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_a_whole_training_step_is_recorded(graph: Any) -> None:
    x, found = torch.randn(2, 4), []
    for is_recorded in (True, False):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def train(net: nn.Module = net, optimizer: Any = optimizer) -> None:
            step(net, x)
            optimizer.step()

        with amanda.apply(Prune(0.5)):
            for _ in range(2 if is_recorded else 6):
                train()
            if is_recorded:
                with recorded(graph):
                    train()  # A recorder that runs the operators, unlike a device.
                for _ in range(3):
                    graph.replay()
        found.append([parameter.detach() for parameter in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_routines_on_the_host_that_look_are_left_out(graph: Any) -> None:
    net, x, tool, other = network(), torch.randn(2, 4), Halving(), NonFinite()
    with warnings.catch_warnings(record=True) as told, amanda.apply(tool, other) as handle:
        warnings.simplefilter("always")
        for _ in range(2):
            step(net, x)
        seen = len(tool.seen)
        with recorded(graph):
            step(net, x)
        graph.replay()
        assert len(tool.seen) == seen
        step(net, x)
        assert len(tool.seen) > seen
        gaps = {gap.what for gap in handle.coverage()["pytorch"]}
    assert "CUDA graphs and those of other devices" in gaps
    (warning,) = [one for one in told if NOTICE in str(one.message)]
    assert "a replay calls no routines on the host" in str(warning.message)
    for each in (tool, other):
        assert any("inside CUDA graphs" in line for line in each.not_seen())


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_edits_on_the_host_are_refused(graph: Any) -> None:
    net, x, tool = network(), torch.randn(2, 4), Halving(lambda value: value * 0.5)
    with amanda.apply(tool):
        wanted = [one.clone() for one in step(net, x)]
        with refused(graph):
            step(net, x)
        assert equal(step(net, x), wanted)


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_replacements_are_refused(graph: Any) -> None:
    tool, x = amanda.Tool(), torch.ones(2)
    tool.add_inst_for_op(lambda context: context.replace_op(lambda value: value * 3))
    with amanda.apply(tool):
        for record in (nullcontext, lambda: refused(graph)):
            with record():
                x.relu()
    assert not ACTIVE


def test_operators_that_did_not_run_before_are_left_out(graph: Any) -> None:
    tool, x, found = Doubling(), torch.ones(2), []

    def run() -> None:
        with recorded(graph):
            found.append(x.relu())
        found.append(x.sigmoid())

    with pytest.warns(amanda.AmandaWarning, match=NOTICE), amanda.apply(tool):
        run()
    inside, outside = found
    assert inside.equal(x)
    assert outside.equal(2 * x.sigmoid())
    assert any("have not run before" in line for line in tool.not_seen())


def test_graphs_of_others_are_not_reached(graph: Any) -> None:
    looking = Halving()
    looking.changes_values = False
    x = torch.ones(2)
    with recorded(graph):
        y = x * 2
    with pytest.warns(amanda.AmandaWarning, match=NOTICE), amanda.apply(looking):
        graph.replay()
    assert looking.not_seen()
    with amanda.apply(Doubling()), pytest.raises(UnsupportedError, match="do not reach CUDA"):
        graph.replay()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amanda.apply(Doubling()), amanda.disabled():
            graph.replay()
        graph.replay()
    assert y.equal(2 * x)


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_tools_that_are_applied_inside_others(graph: Any) -> None:
    net, x = network(), torch.randn(2, 4)
    with amanda.apply(Halving()):
        for _ in range(2):
            wanted = [one.clone() for one in step(net, x)]
        with recorded(graph):
            found = step(net, x)
        with amanda.apply(NonFinite()):
            graph.replay()
            assert equal(found, wanted)
        with amanda.apply(Doubling()), pytest.raises(UnsupportedError, match="do not reach CUDA"):
            graph.replay()
        graph.replay()
        assert equal(found, wanted)


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_tools_that_end_before_others(graph: Any) -> None:
    net, x = network(), torch.randn(2, 4)
    with amanda.apply(NonFinite()):
        with amanda.apply(Halving()):
            for _ in range(2):
                wanted = [one.clone() for one in step(net, x)]
            with recorded(graph):
                found = step(net, x)
            graph.replay()
            assert equal(found, wanted)
        graph.replay()
        plain = [one.clone() for one in found]
        assert equal(plain, step(net, x))
        assert not equal(plain, wanted)


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_a_graph_that_is_recorded_again_has_what_is_applied_then(graph: Any) -> None:
    net, x = network(), torch.randn(2, 4)
    with amanda.apply(Halving()):
        for _ in range(2):
            step(net, x)
        with recorded(graph):
            step(net, x)
        with amanda.disabled(), recorded(graph):
            step(net, x)
        with pytest.raises(UnsupportedError, match="do not reach CUDA"):
            graph.replay()


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_a_graph_keeps_no_tool_alive(graph: Any) -> None:
    net, x, tool = network(), torch.randn(2, 4), Halving()
    held = weakref.ref(tool)
    with amanda.apply(tool):
        for _ in range(2):
            step(net, x)
        with recorded(graph):
            net(x)
    del tool
    gc.collect()
    assert held() is None
    graph.replay()


@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_apply_may_end_in_a_recording(graph: Any) -> None:
    tool = Doubling()
    with amanda.apply(tool):
        graph.capture_begin()
    assert not ACTIVE
    assert not STATE.recordings
    graph.capture_end()
    with amanda.apply(tool):
        assert torch.ones(2).relu().tolist() == [4.0, 4.0]


@on_cuda
@pytest.mark.filterwarnings(f"ignore:{NOTICE}")
def test_a_recorded_training_step_on_a_device() -> None:
    net = network().cuda()
    static = torch.randn(8, 4, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with amanda.apply(Halving()):
        with torch.cuda.stream(side):
            for _ in range(3):
                step(net, static)
        side.synchronize()
        with torch.cuda.graph(graph):
            found = step(net, static)
        for seed in range(3):
            torch.manual_seed(seed)
            static.copy_(torch.randn(8, 4))
            graph.replay()
            kept = [one.clone() for one in found]
            assert equal(kept, step(net, static))
    graph.replay()
    kept = [one.clone() for one in found]
    assert equal(kept, step(net, static))
