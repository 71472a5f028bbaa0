"""Modes and devices of the user's, threads and worker processes beside applied tools."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import amanda
from amanda_core.testing.kit.tools import before, tool, watching

from .tensors import Net, equal

X = torch.randn(2, 3)


def stack_depth() -> int:
    return int(torch._C._len_torch_function_stack())


# Modes of the user's.


class Log(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def planned() -> tuple[list[str], amanda.Tool]:
    seen, watch = watching()
    watch.add_inst_for_op(
        lambda c: c.insert_after_op(lambda *values: tuple(values)), require_outputs=True
    )
    return seen, watch


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_mode_around_apply_sees_what_it_sees_without() -> None:
    x = torch.randn(3, requires_grad=True)
    seen, watch = planned()
    with Log() as mode:
        F.relu(x).exp()
        plain = list(mode.names)
        mode.names.clear()
        with amanda.apply(watch):
            F.relu(x).exp()
        assert mode.names == plain
    assert seen == ["relu", "exp"]


def test_mode_inside_apply_sees_what_it_sees_without() -> None:
    seen, watch = planned()
    with Log() as plain:
        F.relu(X).exp()
    with amanda.apply(watch), Log() as mode:
        F.relu(X).exp()
    assert mode.names == plain.names
    assert seen == ["relu", "exp"]


@pytest.mark.parametrize("mode_first", [True, False])
def test_mode_interleaved_with_a_handle(mode_first: bool) -> None:
    seen, watch = planned()
    mode = Log()
    if mode_first:
        mode.__enter__()
        handle = amanda.attach(watch)
        X.exp()
    else:
        handle = amanda.attach(watch)
        mode.__enter__()
        X.exp()
    handle.remove()
    assert mode.names == ["exp"]
    assert seen == ["exp"]
    X.sin()
    assert mode.names == ["exp", "sin"]
    mode.__exit__(None, None, None)
    assert stack_depth() == 0
    X.cos()
    assert mode.names == ["exp", "sin"]
    assert seen == ["exp"]


def test_default_device_before_inside_and_interleaved() -> None:
    seen, watch = planned()
    with torch.device("meta"), amanda.apply(watch):
        assert torch.ones(1).is_meta
    with amanda.apply(watch):
        with torch.device("meta"):
            assert torch.ones(1).is_meta
        assert not torch.ones(1).is_meta
    assert seen == ["ones"] * 3
    handle = amanda.attach(watch)
    torch.set_default_device("meta")
    try:
        assert torch.ones(1).is_meta
        handle.remove()
        assert torch.ones(1).is_meta
    finally:
        torch.set_default_device(None)
    assert not torch.ones(1).is_meta
    assert seen == ["ones"] * 4
    assert stack_depth() == 0


@pytest.mark.parametrize("outside", [True, False])
def test_dispatch_mode_sees_the_ops_of_the_program(outside: bool) -> None:
    seen, watch = watching()
    mode = Dispatched()
    if outside:
        with mode, amanda.apply(watch):
            F.relu(X).exp()
    else:
        with amanda.apply(watch), mode:
            F.relu(X).exp()
    assert mode.names == ["aten.relu.default", "aten.exp.default"]
    assert seen == ["relu", "exp"]


# A hint of PyTorch up to 2.12.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("listener", ["dispatch mode", "profiler"])
def test_nobody_hears_of_gradients_that_are_read(listener: str) -> None:
    """Modes do not see the changes of shape that make gradients of inputs from a node's results."""
    net = Net()

    def heard(batch: torch.Tensor) -> list[str]:
        net.zero_grad()
        if listener == "dispatch mode":
            with Dispatched() as mode:
                net(batch).sum().backward()
            names = mode.names
        else:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                net(batch).sum().backward()
            names = [event.name for event in profiler.events() if "::" in event.name]
        # Routines get values detached.
        return [name for name in names if "detach" not in name]

    calls: list[int] = []
    asked = tool(lambda context: context.insert_after_backward_op(lambda *g: calls.append(len(g))))
    batches = [X, torch.randn(4, 2, 3)] * 3
    plain = [heard(batch) for batch in batches]
    with amanda.apply(asked):
        assert [heard(batch) for batch in batches] == plain
    assert max(calls) == 3


# Threads and processes.


def test_other_threads_run_vanilla() -> None:
    net, failures = Net(), list[BaseException]()
    seen, watch = watching()

    def work() -> None:
        try:
            for _ in range(5):
                out = net(torch.ones(2, 3))
            x = torch.ones(3, requires_grad=True)
            x.exp().sum().backward()
            torch.optim.SGD([x], 0.1).step()
            repr(out)
        except BaseException as error:
            failures.append(error)

    with amanda.apply(watch):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == []
        X.exp()
    assert seen == ["exp"]
    assert failures == []


def test_each_thread_may_apply_its_own_tools() -> None:
    outer, watch_outer = watching()
    inner, watch_inner = watching()

    def work() -> None:
        with amanda.apply(watch_inner):
            F.relu(X).sin()

    with amanda.apply(watch_outer):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        F.relu(X).exp()
    assert inner == ["relu", "sin"]
    assert outer == ["relu", "exp"]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader(workers: int) -> None:
    data = torch.arange(24.0).view(8, 3)
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork in a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        with amanda.apply(before("stack", lambda tensors: [t * 1 for t in tensors], [0])):
            loader = DataLoader(TensorDataset(data), batch_size=4, num_workers=workers)
            batches = [batch for (batch,) in loader]
    equal(torch.cat(batches), data)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_forked_process_runs_vanilla() -> None:
    doubling = tool(lambda c: c.insert_after_op(lambda y: y * 2), "relu")
    read, write = os.pipe()
    with amanda.apply(doubling):
        child = os.fork()
        if child == 0:
            os.write(write, str(torch.relu(torch.ones(1)).item()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert torch.relu(torch.ones(1)).item() == 2.0
    assert os.read(read, 16) == b"1.0"
