"""The native interceptor: what it redirects, that it puts all back, and that it is robust."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core import OpContext
from amanda_core.errors import DriverError
from amanda_core.runtime.switches import VERSION
from amanda_core.runtime.threads import THREAD
from amanda_core.testing.kit.tools import after
from amanda_driver_torch.execution import reductions
from amanda_driver_torch.interception.interceptor_choice import INTERCEPTORS
from amanda_driver_torch.torch_internals import extension
from amanda_driver_torch.torch_internals.versions import VARIABLE

from .tensors import check_references

pytestmark = pytest.mark.one_interceptor

if extension.native is None:
    pytest.skip(f"no native interceptor: {extension.missing}", allow_module_level=True)
native = extension.native

EARLY = torch.relu
BINDINGS = {
    "function": lambda x: torch.relu(x),
    "early reference": lambda x: EARLY(x),
    "functional": lambda x: F.relu(x),
    "method": lambda x: x.relu(),
    "bound method": lambda x: (lambda bound: bound())(x.relu),
    "starred": lambda x: torch.relu(*(x,)),
    "keyword": lambda x: torch.relu(input=x),
    "mapped": lambda x: next(map(torch.relu, [x])),
}
SPELLINGS = {
    "index": (lambda x: x[0], "__getitem__"),
    "index by name": (lambda x: torch.Tensor.__getitem__(x, 0), "__getitem__"),
    "assignment": (lambda x: x.__setitem__(0, 1.0), "__setitem__"),
    "transpose": (lambda x: x.T, "T"),
    "operator": (lambda x: x + 1, "add"),
    "reflected": (lambda x: 1 + x, "add"),
    "in place": (lambda x: x.__iadd__(1), "add_"),
    "one argument": (lambda x: x.matmul(x.T), "matmul"),
    "dispatcher": (lambda x: torch.ops.aten.relu(x), "relu"),
    "overload": (lambda x: torch.ops.aten.relu.default(x), "relu"),
}


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "native")
    yield
    assert native.count()["installed"] == 0
    assert native.check() == []


class Seen(amanda.Tool):
    """Op types at each execution."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.ids: list[int] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        self.ids.append(context.get_op_id())
        context.insert_before_op(self.note, op_type=context.op_type)

    def note(self, *values: Any, op_type: str) -> None:
        self.ops.append(op_type)


def x() -> torch.Tensor:
    return torch.ones(2, 2)


def test_a_core_with_switches_of_another_layout_is_refused() -> None:
    def apply() -> None:
        THREAD.control.switches[VERSION] += 1  # Of this thread alone.
        with (
            pytest.raises(DriverError, match="built for another version of amanda-core"),
            amanda.apply(amanda.Tool()),
        ):
            raise AssertionError("attached")
        THREAD.control.switches[VERSION] -= 1
        with amanda.apply(after("relu", lambda y: y + 1)):
            results.append(float(torch.relu(torch.tensor(2.0))))
        results.append(float(torch.relu(torch.tensor(2.0))))

    results: list[float] = []
    thread = threading.Thread(target=apply)
    thread.start()
    thread.join()
    assert results == [3.0, 2.0]


@pytest.mark.parametrize("call", BINDINGS.values(), ids=BINDINGS)
def test_each_way_to_a_binding_is_seen(call: Any) -> None:
    tool = Seen()
    with amanda.apply(tool):
        for _ in range(20):  # The interpreter specialises calls that it has seen some times.
            call(x())
    assert tool.ops.count("relu") == 20
    call(x())
    assert tool.ops.count("relu") == 20


@pytest.mark.parametrize(("call", "op_type"), SPELLINGS.values(), ids=SPELLINGS)
def test_what_is_no_function_is_seen(call: Any, op_type: str) -> None:
    tool = Seen()
    tensor = x()
    with amanda.apply(tool):
        call(tensor)
    assert op_type in tool.ops


def test_hashes_and_equality_of_bindings_stay() -> None:
    handlers = {torch.relu: 1, F.linear: 2, torch.Tensor.relu: 3}
    with amanda.apply(Seen()):
        assert handlers[torch.relu] == 1
        assert handlers[F.linear] == 2
        assert handlers[torch.Tensor.relu] == 3
        made_inside = {torch.sigmoid: 4}
    assert made_inside[torch.sigmoid] == 4


def test_everything_is_put_back() -> None:
    module_call = nn.Module.__dict__["__call__"]
    overload_call = torch._ops.OpOverload.__dict__["__call__"]
    with amanda.apply(Seen()):
        assert native.count()["installed"] == 1
        assert native.check() == []

        class Made(torch.Tensor):
            """A type that inherits redirected slots."""

    assert native.check() == []
    assert nn.Module.__dict__["__call__"] is module_call
    assert torch._ops.OpOverload.__dict__["__call__"] is overload_call
    tool = Seen()
    x().as_subclass(Made)[0]
    assert tool.ops == []


def test_nested_and_repeated_sessions_install_once() -> None:
    with amanda.apply(Seen()):
        with amanda.apply(Seen()):
            assert native.count()["installed"] == 1
        assert native.count()["installed"] == 1
        torch.relu(x())


def test_other_threads_run_vanilla_and_have_sessions_of_their_own() -> None:
    mine, other = Seen(), Seen()
    inside, leave = threading.Event(), threading.Event()
    vanilla: list[int] = []

    def without() -> None:
        for _ in range(50):
            torch.relu(x())
        vanilla.append(len(mine.ops))

    def with_own() -> None:
        with amanda.apply(other):
            torch.sigmoid(x())
            inside.set()
            leave.wait(10)
            torch.sigmoid(x())

    threads = [threading.Thread(target=without), threading.Thread(target=with_own)]
    with amanda.apply(mine):
        for thread in threads:
            thread.start()
        threads[0].join()
        inside.wait(10)
        torch.tanh(x())
    leave.set()
    threads[1].join()
    assert "relu" not in mine.ops
    assert "tanh" in mine.ops
    assert other.ops.count("sigmoid") == 2
    assert "tanh" not in other.ops


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_exceptions_leave_nothing_behind(error: type[BaseException]) -> None:
    def fail(*values: Any) -> None:
        raise error("mine")

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(fail))
    layer = nn.Sequential(nn.Linear(2, 2))
    for _ in range(3):
        with pytest.raises(error), amanda.apply(tool):
            layer(x())
    layer(x())


def test_errors_of_torch_itself_pass() -> None:
    with amanda.apply(Seen()):
        for _ in range(3):
            with pytest.raises(RuntimeError):
                torch.mm(torch.ones(2, 3), torch.ones(2, 3))
            with pytest.raises(TypeError, match="unsupported operand"):
                x() + object()  # type: ignore[operator]
            with pytest.raises(IndexError):
                x()[5]


def test_a_forked_process_starts_with_nothing_applied() -> None:
    with amanda.apply(Seen()) as _:
        child = os.fork()
        if child == 0:
            from amanda_driver_torch.threads.state import STATE

            torch.relu(x())
            os._exit(0 if STATE.attachment is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ids_are_those_of_the_other_interceptor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.loose = nn.Parameter(torch.ones(2))

        def forward(self, value: torch.Tensor, skip: bool) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                if not (skip and i == 1):
                    value = torch.relu(layer(value)) * self.loose
            return sum(v.sum() for v in (value, value[0], value.T))  # type: ignore[return-value]

    ids = []
    for name in ("native", "function_mode"):
        monkeypatch.setenv(VARIABLE, name)
        torch.manual_seed(0)
        net, tool = Net(), Seen()
        with amanda.apply(tool):
            for skip in (False, True, True, False, True):
                net(x(), skip)
            weight = torch.ones(2, 2, requires_grad=True)
            for _ in range(3):
                torch.mm(x(), weight)
        ids.append((tool.ids, tool.ops))
    assert ids[0] == ids[1]


def test_recursive_modules_have_sequences_of_their_own() -> None:
    class Tree(nn.Module):
        def forward(self, value: torch.Tensor, depth: int) -> torch.Tensor:
            value = torch.relu(value)
            if depth:
                value = self(value, depth - 1) + self(value, depth - 1)
            return torch.tanh(value)

    tool, tree = Seen(), Tree()
    with amanda.apply(tool):
        for depth in (0, 2, 1, 2, 3, 0):
            tree(x(), depth)
    count = len(set(tool.ids))
    with amanda.apply(tool):
        tree(x(), 3)
    assert len(set(tool.ids)) == count


def test_signature_and_explicit_calls_of_modules() -> None:
    class Loud(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    tool, layer = Seen(), Loud(2, 2)
    expected = inspect.signature(layer)
    with amanda.apply(tool):
        assert inspect.signature(layer) == expected
        value = x()
        layer(value)
        nn.Module.__call__(layer, value)
        layer.__call__(value)
    assert tool.ops == ["ones", "linear", "linear", "linear"]


@pytest.mark.slow
def test_no_reference_is_kept_or_lost() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    value, index = x(), 0

    def program() -> None:
        y = layer(value)
        y = y + 1
        y.T[index].sum()
        y[0] = 1.0
        torch.mul(input=y, other=value)
        torch.ops.aten.relu(y)
        with pytest.raises(RuntimeError):
            torch.mm(value, torch.ones(3))

    own = [value, layer, layer[0], layer[0].weight]
    shared = [torch.relu, torch.Tensor.relu, nn.Module]
    for tool in (amanda.Tool(), Seen()):
        with amanda.apply(tool), torch.no_grad():
            check_references(program, 200, own, shared)


def test_an_op_without_a_plan_runs_no_python() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: None)
    layer = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "/src/amanda" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    with amanda.apply(tool), torch.no_grad():
        for _ in range(3):
            layer(x())
        value = x()
        sys.setprofile(profile)
        try:
            layer(value)
        finally:
            sys.setprofile(None)
    assert calls == []


@pytest.mark.parametrize("is_backward", [False, True])
def test_processes_enter_the_engine_from_python_for_backward_ops_only(
    monkeypatch: pytest.MonkeyPatch, is_backward: bool
) -> None:
    monkeypatch.setattr(reductions, "processes", lambda: 2)
    # A wrapper that another test has left alive might reduce gradients in a later pass.
    monkeypatch.setattr(reductions, "WRAPPERS", {})
    monkeypatch.setattr(reductions, "wrappers", list)
    entered: list[int] = []
    begin = reductions.Reductions.begin

    def begun(self: reductions.Reductions) -> Any:
        entered.append(self.passes)
        return begin(self)

    monkeypatch.setattr(reductions.Reductions, "begin", begun)
    tool, layer = amanda.Tool(), nn.Linear(2, 2)
    tool.add_inst_for_op(lambda context: None, backward=is_backward)
    layer(x()).sum().backward()
    with amanda.apply(tool):
        for _ in range(3):
            layer(x()).sum().backward()
    # Once there was nothing to reduce, the passes after it do not ask again.
    assert entered == ([0] if is_backward else [])


def test_the_choice_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert INTERCEPTORS.choice() == ("native", f"{VARIABLE} asks for it")
    monkeypatch.delenv(VARIABLE)
    assert INTERCEPTORS.choice().name == "native"
    monkeypatch.setenv(VARIABLE, "no such")
    with pytest.raises(amanda.AmandaError, match="is not the name of an interceptor"):
        INTERCEPTORS.choice()
