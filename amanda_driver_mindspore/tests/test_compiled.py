"""Graph mode and `mindspore.jit`: Python while a tool acts, compiled before and afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import amanda
from amanda_core.plugins import discovery
from amanda_tools.flops import Flops
from amanda_tools.trace import Trace

from .networks import numbers


class Net(nn.Cell):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(4, 4, weight_init="ones", has_bias=False)

    def construct(self, x: Any) -> Any:
        return ops.relu(self.fc(x)) * 2


NET, X = Net(), Tensor(np.ones((2, 4), np.float32))


def _function(x: Any) -> Any:
    return ops.relu(NET.fc(x)) * 2


jitted = ms.jit(_function)
#: A program of its own: MindSpore traces only where each frame has a source, unlike pytest's.
TRACED = """
import mindspore as ms
import numpy as np
from mindspore import ops

import amanda


@ms.jit(capture_mode="trace")
def traced(x):
    return ops.relu(x + 1) * 2


def run():
    return float(traced(ms.Tensor(np.ones((2, 4), np.float32))).asnumpy()[0, 0])


def analyse(context):
    if context["type"] == "relu":
        context.insert_after_op(lambda y: y * 10)


tool = amanda.Tool()
tool.add_inst_for_op(analyse)
plain = run()
with amanda.apply(tool):
    edited = [run(), run()]
print([plain, *edited, run()])
"""


@pytest.fixture
def graph_mode() -> Iterator[None]:
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def tenfold() -> tuple[amanda.Tool, list[str]]:
    """Return a tool that multiplies what ReLU returns, and the operators that it sees."""
    seen: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        assert context["not_compiled"]
        context.insert_before_op(lambda *values: seen.append(context.name), observe=True)
        if context["type"] == "relu":
            context.insert_after_op(lambda y: y * 10)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    return tool, seen


def value(result: Any) -> float:
    return float(result.asnumpy()[0, 0])


@pytest.mark.usefixtures("graph_mode")
def test_a_cell_in_graph_mode_is_edited_only_under_a_tool() -> None:
    tool, seen = tenfold()
    assert value(NET(X)) == 8
    with amanda.apply(tool):
        assert value(NET(X)) == 80
        assert value(NET(X)) == 80
        assert ms.get_context("mode") == ms.GRAPH_MODE
    assert seen == ["fc/MatMul", "ReLU", "mul"] * 2 or seen == ["fc/MatMul", "ReLU", "__mul__"] * 2
    assert value(NET(X)) == 8
    assert python_calls(lambda: NET(X)) == 0  # It is the program that was compiled before.
    assert "MS_JIT" not in os.environ


@pytest.mark.usefixtures("graph_mode")
def test_a_gradient_function_made_before_is_edited_and_compiled_again_afterwards() -> None:
    def loss(x: Any) -> Any:
        return NET(x).sum()

    run = ms.value_and_grad(loss, 0, NET.trainable_params())

    def results() -> list[Any]:
        total, (of_x, of_weights) = run(X)
        return [float(total.asnumpy()), of_x.asnumpy()[0, 0], of_weights[0].asnumpy()[0, 0]]

    assert results() == [64, 8, 4]
    tool, seen = tenfold()
    with amanda.apply(tool):
        # The edit passes the gradient straight through.
        assert results() == [640, 8, 4]
    assert "fc/MatMul" in " ".join(seen)
    assert results() == [64, 8, 4]


def test_a_jitted_function_is_edited_only_under_a_tool() -> None:
    tool, seen = tenfold()
    assert value(jitted(X)) == 8
    with amanda.apply(tool):
        assert value(jitted(X)) == 80
    assert len(seen) == 3
    assert value(jitted(X)) == 8


def test_a_traced_function_is_edited_only_under_a_tool(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TRACED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.strip().splitlines()[-1:] == ["[4.0, 40.0, 40.0, 4.0]"], done.stderr


def python_calls(run: Callable[[], Any]) -> int:
    """Return how often the Python code of `Net.construct` runs."""
    count, original = [0], Net.construct

    def construct(self: Any, x: Any) -> Any:
        count[0] += 1
        return original(self, x)

    Net.construct = construct  # type: ignore[method-assign]
    try:
        run()
    finally:
        Net.construct = original  # type: ignore[method-assign]
    return count[0]


@pytest.mark.usefixtures("graph_mode")
def test_a_tool_that_does_not_act_leaves_the_program_compiled() -> None:
    NET(X)
    idle = amanda.Tool()
    names: list[str] = []
    idle.add_inst_for_op(lambda context: names.append(context.name))
    with amanda.apply(idle):
        # Once as Python, to see whether the tool acts anywhere.
        assert [python_calls(lambda: NET(X)) for _ in range(3)] == [1, 0, 0]
        assert value(NET(X)) == 8
        wider = Tensor(np.ones((3, 4), np.float32))
        assert [python_calls(lambda: NET(wider)) for _ in range(2)] == [1, 0]
    assert len(names) == 3


def test_tools_say_that_programs_were_not_compiled() -> None:
    tool = Flops()
    with amanda.apply(tool):
        jitted(X)
    assert any("compiled callables ran eagerly" in note for note in tool.result().notes)


@pytest.mark.usefixtures("graph_mode")
def test_a_training_step_made_in_graph_mode() -> None:
    def made() -> Any:
        net = Net()
        optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        return nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer), net

    target = numbers(2, 4)
    plain, plain_net = made()
    losses = [float(plain(X, target).asnumpy()) for _ in range(3)]
    step, net = made()
    found = [float(step(X, target).asnumpy())]
    tool = amanda.Tool()
    steps: list[int] = []
    tool.add_inst_for_op(lambda context: context.insert_before_op(lambda *values: None))
    tool.add_inst_for_step(end=steps.append)
    with amanda.apply(tool):
        found.append(float(step(X, target).asnumpy()))
    assert steps == [0]
    found.append(float(step(X, target).asnumpy()))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(net.fc.weight.asnumpy(), plain_net.fc.weight.asnumpy(), rtol=1e-5)


def test_the_driver_says_what_stays_compiled() -> None:
    driver = next(one for one in discovery.drivers() if one.info.name == "mindspore")
    assert driver.info.capabilities_in("eager") >= {"steps", "threads", "recomputed_edits"}
    tool = Trace()
    with amanda.apply(tool) as handle:
        jitted(X)
        gaps = " ".join(gap.what for many in handle.coverage().values() for gap in many)
    assert "bytecode" in gaps
    assert "optimizers" in gaps
