"""Latency of compiled programs by call and kernel, on Inductor for the CPU."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_tools.latency import Latency
from amanda_tools.nonfinite import NonFinite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_interceptor,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]

CALL, KERNEL = "compiled_call", "compiled_kernel"


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.norm = nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.act(self.first(x))))
        return found.softmax(-1)


def trained(call: Any, network: nn.Module, steps: int) -> list[torch.Tensor]:
    """Train, and return the gradients of the last step."""
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        call(torch.ones(8, 16)).pow(2).sum().backward()
        optimizer.step()
    return [p.grad.clone() for p in network.parameters() if p.grad is not None]


def timed(tool: Latency, steps: int = 4) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    network = Network()
    compiled = torch.compile(network, fullgraph=True)
    with amanda.apply(tool):
        gradients = trained(compiled, network, steps)
    return tool.result(), gradients


def test_training_is_timed_by_call_and_kernel() -> None:
    result, gradients = timed(Latency(warmup=0))
    torch.manual_seed(0)
    network = Network()
    plain = trained(torch.compile(network, fullgraph=True), network, 4)
    assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))
    calls = [op for op in result.ops if op.type == CALL]
    assert [(op.phase, op.calls) for op in calls] == [("forward", 4), ("backward", 4)]
    kernels = [op for op in result.ops if op.type == KERNEL]
    assert all(op.calls == 4 and op.operators for op in kernels)
    for call in calls:
        inside = [op for op in kernels if op.phase == call.phase]
        assert len(inside) >= 4
        assert sum(op.total for op in inside) + call.self == call.total
    # Each operator of the program is in a kernel of both halves.
    names = {"first/linear", "act/gelu", "norm/layer_norm", "last/linear", "softmax"}
    for phase in ("forward", "backward"):
        held = {name for op in kernels if op.phase == phase for name in op.operators}
        assert held == names
    (gelu,) = (op for op in kernels if op.phase == "forward" and "gelu" in op.kind)
    assert gelu.kind == "gelu + layer_norm"
    by_module = result.by_module()
    assert by_module[""].time + sum(step.tool for step in result.steps) == result.wall
    assert min(by_module[name].self for name in ("first", "last")) > 0
    assert not any(op.name.endswith("/linear") for op in result.ops)
    assert any("kernels that the compiler made" in note for note in result.notes)
    for step in result.steps:
        assert 0 <= step.ops <= step.wall


def test_operators_can_be_timed_one_by_one_instead() -> None:
    result, _ = timed(Latency(warmup=0, uncompiled=True))
    assert not any(op.type in (CALL, KERNEL) for op in result.ops)
    assert sum(op.type == "linear" and op.phase == "forward" for op in result.ops) == 2


def test_inference_and_another_tool() -> None:
    torch.manual_seed(0)
    network = Network()
    compiled, tool, other = torch.compile(network), Latency(warmup=0), NonFinite()
    x = torch.ones(8, 16)
    with torch.no_grad(), amanda.apply(tool, other):
        assert torch.allclose(compiled(x), network(x), atol=1e-6)
    ops = tool.result().ops
    assert [op.calls for op in ops if op.type == CALL] == [1]
    assert other.result().checked


def test_only_tools_that_ask_are_shown_kernels() -> None:
    seen: list[str] = []

    class Look(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(lambda context: seen.append(context.op_type))

    network = Network()
    with torch.no_grad(), amanda.apply(Latency(), Look()):
        torch.compile(network)(torch.ones(8, 16))
    assert "linear" in seen
    assert not {CALL, KERNEL} & set(seen)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class AtKernels(amanda.Tool):
    """Calls a routine at kernels."""

    sees_compiled_calls = True

    def __init__(self, observe: bool) -> None:
        super().__init__()
        self.observe, self.calls = observe, 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type == KERNEL:
            context.insert_before_op(self.count, observe=self.observe)

    def count(self, *values: Any) -> None:
        assert not values
        self.calls += 1


def test_any_routine_can_observe_kernels_and_none_can_edit() -> None:
    network, x = Network(), torch.ones(8, 16)
    compiled = torch.compile(network)
    expected = network(x)
    with torch.no_grad(), amanda.apply(tool := AtKernels(observe=True)):
        for _ in range(3):
            compiled(x)
    assert tool.calls
    assert tool.calls % 3 == 0
    with (
        torch.no_grad(),
        pytest.warns(amanda.AmandaWarning, match="can only observe"),
        amanda.apply(AtKernels(observe=False)),
    ):
        assert torch.allclose(compiled(x), expected, atol=1e-6)


def test_an_error_of_a_routine_leaves_the_call() -> None:
    class Failing(AtKernels):
        def count(self, *values: Any) -> None:
            raise KeyError("mine")

    compiled = torch.compile(Network())
    with torch.no_grad(), amanda.apply(Failing(observe=True)), pytest.raises(KeyError):
        compiled(torch.ones(8, 16))


def test_without_generated_python_the_call_is_timed_alone() -> None:
    network, x = Network(), torch.ones(8, 16)
    compiled = torch.compile(network, options={"cpp_wrapper": True})
    with torch.no_grad(), amanda.apply(tool := Latency(warmup=0)):
        compiled(x)
    result = tool.result()
    assert [op.type for op in result.ops] == [CALL]
    assert any("kernels: the compiler has generated" in note for note in result.notes)


def test_the_same_layer_at_two_places_has_kernels_of_each() -> None:
    blocks = nn.Sequential(Block(), Block())
    for block in blocks:
        block.compile()
    with torch.no_grad(), amanda.apply(tool := Latency(warmup=0)):
        for _ in range(2):
            blocks(torch.ones(2, 8))
    calls = [op for op in tool.result().ops if op.type == CALL]
    assert [(op.module, op.calls) for op in calls] == [("0", 2), ("1", 2)]
    held = [name for op in tool.result().ops for name in op.operators]
    assert sorted(held) == ["0.inner/linear", "0/tanh", "1.inner/linear", "1/tanh"]
