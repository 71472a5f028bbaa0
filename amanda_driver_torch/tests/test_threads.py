"""Tools for all threads of a program, and what results say of threads that were not seen.

Each row of the table in `docs/guides/running.md` about PyTorch is a program here.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amanda
from amanda_core.errors import ConfigError
from amanda_driver_torch.torch_internals.extension import native

NATIVE = os.environ.get("AMANDA_TORCH_INTERCEPTOR") != "function_mode" and native is not None
X = torch.ones(1, 4)


class Calls(amanda.Tool):
    """Counts executions by readable name, and by the name of the thread."""

    def __init__(self, backward: bool = False, model: bool = True) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.threads: Counter[str] = Counter()
        self.gradients: Counter[str] = Counter()
        self.add_inst_for_op(self.analyse)
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.count, inputs=[], observe=True, name=context.name)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.count_backward, observe=True, name=context.name)

    def count(self, name: str) -> None:
        self.calls[name] += 1
        self.threads[threading.current_thread().name] += 1

    def count_backward(self, *gradients: Any, name: str) -> None:
        self.gradients[name] += 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.relu(self.a(x)))


CALL = vars(nn.Module)["__call__"]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert vars(nn.Module)["__call__"] is CALL
    if native is not None:
        assert native.count()["installed"] == 0
        assert native.check() == []


def in_thread(work: Callable[[], object], name: str = "worker") -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


# Programs, each of which calls a model this often in other threads than the main one.


def pool(net: nn.Module) -> int:
    with ThreadPoolExecutor(4) as threads:
        return len(list(threads.map(lambda _: net(X), range(100))))


def plain_threads(net: nn.Module) -> int:
    for _ in range(5):
        in_thread(lambda: net(X))
    return 5


def subclass(net: nn.Module) -> int:
    class Worker(threading.Thread):
        def run(self) -> None:
            net(X)

    worker = Worker()
    worker.start()
    worker.join()
    return 1


def timer(net: nn.Module) -> int:
    one = threading.Timer(0, lambda: net(X))
    one.start()
    one.join()
    return 1


def thread_pool(net: nn.Module) -> int:
    with ThreadPool(2) as threads:
        return len(threads.map(lambda _: net(X), range(10)))


def executor_of_asyncio(net: nn.Module) -> int:
    async def serve() -> int:
        loop = asyncio.get_running_loop()
        waiting = [loop.run_in_executor(None, net, X) for _ in range(10)]
        waiting += [asyncio.ensure_future(asyncio.to_thread(net, X)) for _ in range(10)]
        return len(await asyncio.gather(*waiting))

    return asyncio.run(serve())


def without_threading(net: nn.Module) -> int:
    import _thread

    done = threading.Event()

    def run() -> None:
        net(X)
        done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(10)
    return 1


def producer(net: nn.Module) -> int:
    """A thread that was waiting before the tools were applied, by a queue."""
    import queue

    todo: queue.Queue[Any] = queue.Queue()
    done: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        while (x := todo.get()) is not None:
            done.put(net(x))

    worker = threading.Thread(target=run)
    worker.start()
    for _ in range(3):
        todo.put(X)
        done.get()
    todo.put(None)
    worker.join()
    return 3


PROGRAMS = (
    *(pool, plain_threads, subclass, timer, thread_pool, executor_of_asyncio),
    *(without_threading, producer),
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_thread_is_instrumented(program: Callable[[nn.Module], int]) -> None:
    net, tool = Net(), Calls()
    with amanda.apply(tool, threads="all"):
        net(X)
        calls = program(net) + 1
    # The same ops as in the main thread, in one account.
    assert tool.calls == {"a/linear": calls, "relu": calls, "b/linear": calls}
    assert tool.not_seen() == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_it_results_say_so(program: Callable[[nn.Module], int]) -> None:
    net, tool = Net(), Calls()

    def run() -> None:
        with amanda.apply(tool):
            net(X)
            program(net)

    with pytest.warns(amanda.AmandaWarning, match="run without tools") as told:
        run()
    assert tool.calls == {"a/linear": 1, "relu": 1, "b/linear": 1}
    assert len([one for one in told if "run without tools" in str(one.message)]) == 1
    assert tool.not_seen()[0].startswith("operators not seen of thread")
    if NATIVE:
        assert "first linear" in tool.not_seen()[0]


def test_a_pool_from_before_is_instrumented_until_the_tools_are_removed() -> None:
    net, first, second = Net(), Calls(), Calls()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(net, X).result()
        for tool in (first, second):
            with amanda.apply(tool, threads="all"):
                for _ in range(3):
                    threads.submit(net, X).result()
            plain = threads.submit(net, X).result()
            assert tool.calls == {"a/linear": 3, "relu": 3, "b/linear": 3}
    assert torch.equal(plain, net(X))


def test_edits_take_effect_in_each_thread() -> None:
    net = Net()
    double = amanda.Tool()
    double.add_inst_for_op(
        lambda c: c.insert_after_op(lambda y: 2 * y) if c.name == "b/linear" else None
    )
    with ThreadPoolExecutor(3) as threads, amanda.apply(double, threads="all"):
        outputs = list(threads.map(lambda _: net(X), range(30)))
    assert all(torch.equal(output, 2 * net(X)) for output in outputs)


def test_a_leafs_gradient_is_counted_once_although_threads_share_the_model() -> None:
    net, tool = Net(), Calls(backward=True)

    def train() -> None:
        for _ in range(10):
            net(X).sum().backward()

    with amanda.apply(tool, threads="all"):
        train()
        workers = [threading.Thread(target=train) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert set(tool.gradients.values()) == {50}
    assert len([name for name in tool.gradients if "AccumulateGrad" in name]) == 4


def test_backward_in_another_thread_than_forward() -> None:
    net, tool, outputs = Net(), Calls(backward=True), []
    with amanda.apply(tool, threads="all"):
        in_thread(lambda: outputs.append(net(X)))
        in_thread(lambda: outputs.append(net(X)))
        sum(outputs).sum().backward()  # The threads of the forward pass have ended.
    linear = [count for name, count in tool.gradients.items() if name.startswith("a/linear:")]
    assert set(linear) == {2}
    accumulated = [count for name, count in tool.gradients.items() if "AccumulateGrad" in name]
    assert accumulated == [1] * 4


def test_an_optimizers_step_in_a_thread_is_a_step_of_the_tools() -> None:
    net, tool = Net(), Calls()
    steps: list[Any] = []
    tool.add_inst_for_step(begin=steps.append)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train() -> None:
        for _ in range(3):
            net(X).sum().backward()
            optimizer.step()

    with amanda.apply(tool, threads="all"):
        in_thread(train)
        amanda.step()
        in_thread(amanda.step)  # No session is there, so it is nobody's step.
    assert steps == [0, 1, 2, 3, 4]


def test_other_models_in_other_threads_keep_accounts_of_their_own() -> None:
    tool, one, two = Calls(), nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    ids: dict[str, set[int]] = {}
    tool.add_inst_for_op(lambda c: ids.setdefault(c.name, set()).add(c.get_op_id()))
    with amanda.apply(tool, threads="all"):
        one(X)
        in_thread(lambda: two(X))
        in_thread(lambda: one(X))
    assert tool.calls == {"0/linear": 2, "Sequential#2:0/linear": 1}
    assert all(len(found) == 1 for found in ids.values())


def test_tools_of_a_thread_run_after_those_of_all_threads() -> None:
    net, outer, inner = Net(), Calls(), Calls()

    def work() -> None:
        with amanda.apply(inner):  # Before the thread has run any operator.
            net(X)
        net(X)

    with amanda.apply(outer, threads="all"):
        in_thread(work)
    assert outer.calls["relu"] == 2
    assert inner.calls["relu"] == 1


def test_nested_tools_for_all_threads_come_and_go_in_each() -> None:
    net, outer, inner = Net(), Calls(), Calls()
    with ThreadPoolExecutor(1) as threads, amanda.apply(outer, threads="all"):
        threads.submit(net, X).result()
        with amanda.apply(inner, threads="all"):
            threads.submit(net, X).result()
            net(X)
        threads.submit(net, X).result()
        with amanda.apply(amanda.Tool()):  # Of this thread alone.
            threads.submit(net, X).result()
    assert outer.calls["relu"] == 5
    assert inner.calls["relu"] == 2


class Uncertain(amanda.Tool):
    """Counts in two statements, between which threads change."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.inside = self.most = 0
        self.add_inst_for_op(lambda c: c.insert_before_op(self.routine, inputs=[], observe=True))

    def routine(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        before = self.count
        time.sleep(0.0001)
        self.count = before + 1
        self.inside -= 1


def test_routines_of_one_tool_take_turns() -> None:
    net, tool = Net(), Uncertain()
    with ThreadPoolExecutor(4) as threads, amanda.apply(tool, threads="all"):
        list(threads.map(lambda _: net(X), range(40)))
    assert (tool.count, tool.most) == (120, 1)


def test_a_tool_ends_once_after_all_threads() -> None:
    net, tool, ends = Net(), Calls(), []
    tool.add_inst_for_end(lambda: ends.append(threading.current_thread().name))
    with amanda.apply(tool, threads="all"):
        in_thread(lambda: net(X))
        assert ends == []
    assert ends == [threading.main_thread().name]


def test_the_error_of_a_routine_reaches_its_own_thread() -> None:
    net, tool = Net(), amanda.Tool()

    def fail(*values: Any) -> None:
        raise ValueError("mine")

    tool.add_inst_for_op(lambda c: c.insert_before_op(fail) if c.name == "relu" else None)
    with amanda.apply(tool, threads="all"):
        with pytest.raises(ValueError, match="mine"):
            in_thread(lambda: net(X))
        with ThreadPoolExecutor(1) as threads:
            assert isinstance(threads.submit(net, X).exception(), ValueError)


def test_disabled_holds_in_its_thread() -> None:
    net, tool = Net(), Calls()

    def work() -> None:
        with amanda.disabled():
            net(X)
        net(X)
        with amanda.disabled():
            net(X)

    with ThreadPoolExecutor(1) as threads:
        for count in (1, 2):
            with amanda.apply(tool, threads="all"), amanda.disabled():
                in_thread(work)
            assert tool.calls["relu"] == 2 * count - 1
            with amanda.apply(tool, threads="all"):
                threads.submit(work).result()
            assert tool.calls["relu"] == 2 * count


def test_a_thread_that_has_left_is_missed_by_the_outer_tools() -> None:
    net, outer, inner = Net(), Calls(), Calls()
    with ThreadPoolExecutor(1) as threads, amanda.apply(outer):
        with amanda.apply(inner, threads="all"):
            threads.submit(net, X).result()
        assert outer.not_seen() == []
        with pytest.warns(amanda.AmandaWarning, match="run without tools"):
            threads.submit(net, X).result()
    assert outer.not_seen() != []
    assert inner.calls["relu"] == 1


def test_collate_in_the_main_thread_and_pinning_in_one_of_its_own() -> None:
    tool = Calls()

    def collate(rows: list[Any]) -> torch.Tensor:
        return torch.stack([row[0] for row in rows]).exp()

    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, collate_fn=collate)
    with amanda.apply(tool, threads="all"):
        assert len(list(data)) == 2
    assert tool.calls["exp"] == 2


def test_threads_that_run_while_tools_come_and_go() -> None:
    net, ends = Net(), threading.Event()
    expected, failed = net(X).detach(), []

    def work() -> None:
        try:
            while not ends.is_set():
                y = net(X)
                assert torch.equal(y, expected)
                y.sum().backward()
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for worker in workers:
            worker.start()
        for _ in range(10):
            with amanda.apply(Calls(backward=True), threads="all"):
                net(X)
    finally:
        ends.set()
        for worker in workers:
            worker.join()
        sys.setswitchinterval(interval)
    assert failed == []


#: A backward pass that begins while a session leaves its thread, and waits for another routine.
LEFT = """
import threading, time, torch, amanda
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.extension import native

x, ready, waits = torch.ones(4, requires_grad=True), threading.Event(), threading.Event()
last = threading.local()
told = {}

class Tool(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.add_inst_for_op(lambda c: c.insert_before_op(self.before, inputs=[], observe=True))
        self.add_inst_for_op(
            lambda c: c.insert_before_backward_op(self.count, observe=True), backward=True
        )

    def before(self):
        if getattr(last, "worker", False):
            told["state"] = native.this_thread(), STATE.attachment
            told["left"] = [native.leave_thread(*told["state"])]
        elif getattr(last, "main", False):  # It holds the tool, while the backward pass waits.
            waits.set()
            time.sleep(0.3)
            told["left"].append(native.leave_thread(*told["state"]))

    def count(self, *gradients):
        self.calls += 1

def step(worker=False):
    last.worker = worker
    loss = x.sum()
    last.worker = False
    if worker:
        ready.set()
        waits.wait()
        time.sleep(0.1)
    loss.backward()

def work():
    for number in range(4):
        step(worker=number == 3)

worker = threading.Thread(target=work)
with amanda.apply(tool := Tool(), threads="all"):
    worker.start()
    ready.wait()
    last.main = True
    x.exp()
    last.main = False
    worker.join()
assert told["left"] == [False, True], told
assert x.grad.tolist() == [4.0] * 4, x.grad
assert native.check() == []
print("ended", tool.calls)
"""


@pytest.mark.skipif(not NATIVE, reason="the other interceptor calls no routines without Python")
def test_a_backward_pass_that_begins_while_a_session_leaves_its_thread() -> None:
    found = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout[:5]) == (0, "ended"), found


def test_a_forked_process_runs_without_tools() -> None:
    net, tool = Net(), Calls()
    with amanda.apply(tool, threads="all"):
        in_thread(lambda: net(X))
        child = os.fork()
        if child == 0:
            before = tool.calls.copy()
            thread = threading.Thread(target=net, args=(X,))
            thread.start()
            thread.join()
            net(X)
            os._exit(0 if tool.calls == before else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match="threads='some' is not an option"):
        amanda.apply(amanda.Tool(), threads="some")  # type: ignore[arg-type]
