"""The native interceptor where things go wrong or go on at the same time: nothing is left."""

from __future__ import annotations

import ctypes
import importlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import amanda
import amanda_driver_torch
from amanda import OpContext
from amanda_driver_torch.torch_internals import extension
from amanda_driver_torch.torch_internals.versions import VARIABLE

from .tensors import check_references

native = extension.native

pytestmark = [
    pytest.mark.skipif(native is None, reason=extension.missing),
    pytest.mark.one_interceptor,
]


@pytest.fixture(autouse=True)
def _natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "native")


class Count(amanda.Tool):
    """Counts what runs, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward = 0, 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        context.insert_before_op(self.before)
        context.insert_after_backward_op(self.after)

    def before(self, *values: Any) -> None:
        self.forward += 1

    def after(self, *grads: Any) -> None:
        self.backward += 1


class Scale(amanda.Tool):
    """Doubles each output of linears, and each gradient of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context.op_type == "linear":
            context.insert_after_op(lambda y: y * 2)
            context.insert_after_backward_op(lambda grad: grad * 2, grad_inputs=[1])


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_subinterpreters_are_refused() -> None:
    done = python(
        "import importlib, sys\n"
        "name = '_xxsubinterpreters' if sys.version_info < (3, 13) else '_interpreters'\n"
        "interpreters = importlib.import_module(name)\n"
        "import amanda_driver_torch._native\n"
        "one = interpreters.create()\n"
        "try:\n"
        "    failed = interpreters.run_string(one, 'import amanda_driver_torch._native')\n"
        "except Exception as error:\n"
        "    failed = error\n"
        "assert 'interpreter' in str(failed), failed\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_second_copy_is_refused_and_reloading_changes_nothing() -> None:
    assert importlib.reload(native) is native
    done = python(
        "import sys, importlib\n"
        "import amanda_driver_torch._native as first\n"
        "del sys.modules['amanda_driver_torch._native']\n"
        "try:\n"
        "    importlib.import_module('amanda_driver_torch._native')\n"
        "except ImportError as error:\n"
        "    assert 'already' in str(error)\n"
        "else:\n"
        "    raise SystemExit('loaded twice')\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "amanda"])
def test_torch_may_be_imported_before_or_after(first: str) -> None:
    imports = "import torch\nimport amanda\n" if first == "torch" else "import amanda\n"
    done = python(
        f"{imports}"
        "seen = []\n"
        "tool = amanda.Tool()\n"
        "tool.add_inst_for_op(lambda context: seen.append(context.op_type))\n"
        "with amanda.apply(tool):\n"
        "    import torch\n"
        "    torch.ones(2).relu()\n"
        "assert 'relu' in seen, seen\n"
        "from amanda_driver_torch import _native\n"
        "assert _native.count()['installed'] == 0 and _native.check() == []\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_interpreter_shuts_down_with_tools_applied() -> None:
    done = python(
        "import atexit, threading, torch, amanda\n"
        "tool = amanda.Tool()\n"
        "tool.add_inst_for_op(lambda context: context.insert_before_op(lambda *values: None))\n"
        "layer = torch.nn.Linear(2, 2)\n"
        "class Last:\n"
        "    def __del__(self):\n"
        "        torch.ones(2).relu()\n"
        "last = Last()\n"
        "atexit.register(lambda: layer(torch.ones(2)))\n"
        "amanda.attach(tool)\n"
        "for _ in range(5):\n"
        "    layer(torch.ones(2)).sum().backward()\n"
        "def other():\n"
        "    amanda.attach(amanda.Tool())\n"
        "    layer(torch.ones(2))\n"
        "thread = threading.Thread(target=other)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    assert done.returncode == 0, done.stderr


class Squares(Dataset[torch.Tensor]):
    """Computes with torch in the workers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if native.count()["installed"] != 0:
            raise AssertionError("a worker that loads data runs vanilla")
        return torch.tensor([float(index)]).square()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_that_load_data_run_vanilla() -> None:
    tool = Count()
    with amanda.apply(tool):
        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        values = [value for batch in loader for value in batch.flatten().tolist()]
        assert native.count()["installed"] == 1
    assert values == [float(i * i) for i in range(8)]
    assert native.check() == []


def test_threads_that_apply_and_threads_that_do_not_run_side_by_side() -> None:
    layer, stop, failures = nn.Linear(3, 3), threading.Event(), []
    value = torch.ones(2, 3)
    plain = layer(value)
    tools = [Count() for _ in range(3)]

    def guard(function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)
            raise

    def run() -> None:
        while not stop.is_set():
            assert torch.equal(layer(value), plain)

    def enter(tool: Count) -> None:
        for _ in range(40):
            with amanda.apply(tool):
                assert torch.equal(layer(value), plain)

    vanilla = threading.Thread(target=guard, args=(run,))
    threads = [threading.Thread(target=guard, args=(enter, tool)) for tool in tools]
    for thread in (vanilla, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    vanilla.join()
    assert failures == []
    assert [tool.forward for tool in tools] == [40, 40, 40]
    assert native.count()["installed"] == 0
    assert native.check() == []


def test_an_interrupt_leaves_nothing_behind() -> None:
    def interrupt(*values: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(interrupt))
    with pytest.raises(KeyboardInterrupt), amanda.apply(tool):
        nn.Linear(2, 2)(torch.ones(2))
    assert native.count()["installed"] == 0
    assert native.check() == []
    counting = Count()
    with amanda.apply(counting):
        torch.ones(2).relu()
    assert counting.forward == 2


def test_what_others_put_in_meanwhile_is_reported_and_stays() -> None:
    # The field of a builtin function that calls go through.
    place = ctypes.c_void_p.from_address(id(torch.relu) + 6 * ctypes.sizeof(ctypes.c_void_p))
    found = place.value
    with amanda.apply(Count()):
        ours = place.value
        assert ours != found
        place.value = found
        assert any("relu" in name for name in native.check())
        assert any("relu" in name for name in amanda_driver_torch.interceptor().misplaced)
    assert place.value == found
    assert native.check() == []


def test_the_diagnosis_names_what_is_used() -> None:
    diagnosis = amanda_driver_torch.interceptor()
    assert diagnosis.name == "native"
    assert not diagnosis.missing
    assert not diagnosis.misplaced
    assert "not seen: torch.Tensor(...)" in str(diagnosis)


@pytest.fixture(params=["library", "python"])
def asked(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return who is called for torch's state: its library or, if a symbol is missing, Python."""
    from amanda_driver_torch.interception import native_interceptor

    native_interceptor._define()
    relu = torch._C._VariableFunctions.relu
    native_interceptor._set_up(relu if request.param == "library" else None)
    yield request.param
    native_interceptor._set_up(relu)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("asked")
def test_a_plan_is_not_run_on_stand_ins() -> None:
    layer, value, batch, tool = nn.Linear(2, 2), torch.ones(2), torch.ones(3, 2), Count()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with amanda.apply(tool), torch.no_grad():
        for _ in range(3):
            layer(value)
        before = tool.forward
        with pytest.warns(amanda.AmandaWarning, match=r"torch\.func"):
            torch.func.vmap(layer)(batch)
        torch.jit.trace(layer, value)  # type: ignore[no-untyped-call]
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer(value)
        assert tool.forward == before
        layer(value)
        assert tool.forward == before + 1


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("times", [1, 4])
def test_plans_with_gradients_and_without_take_turns(times: int) -> None:
    torch.manual_seed(0)
    layer, value = nn.Linear(3, 3), torch.randn(2, 3)
    reference = nn.Linear(3, 3)
    reference.load_state_dict(layer.state_dict())
    reference(value).sum().backward()
    expected = (reference(value) * 2).detach()
    assert reference.weight.grad is not None
    assert reference.bias.grad is not None
    doubled = reference.weight.grad * 2
    with amanda.apply(Scale()):
        for _ in range(3):
            for _ in range(times):
                with torch.no_grad():
                    assert torch.equal(layer(value), expected)
            for _ in range(times):
                layer.zero_grad()
                layer(value).sum().backward()
                assert layer.weight.grad is not None
                assert layer.bias.grad is not None
                assert torch.equal(layer.weight.grad, doubled)
                assert torch.equal(layer.bias.grad, reference.bias.grad)
            layer.weight.requires_grad_(False)
            layer(value).sum().backward()
            layer.weight.requires_grad_(True)


def test_modules_that_change_places_have_other_paths() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.b(self.a(value))
            return result

    paths: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_op(
            lambda *values, path: paths.append(path), path=context.module_path
        )
    )
    model, value = Two(), torch.ones(2)
    with amanda.apply(tool):
        for _ in range(3):
            model(value)
        assert paths == ["a", "b"] * 3
        paths.clear()
        children = model._modules
        children["a"], children["b"] = children["b"], children["a"]
        for _ in range(3):
            model(value)
        assert paths == ["a", "b"] * 3


@pytest.mark.slow
def test_no_path_keeps_or_loses_a_reference() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
    value = torch.ones(2, 2)

    class Failing(Count):
        def analyse(self, context: OpContext) -> None:
            super().analyse(context)
            if context.op_type == "tanh":
                context.insert_before_op(self.fail)

        def fail(self, *values: Any) -> None:
            raise ValueError("told to")

    def program() -> None:
        layer.zero_grad()
        layer(value).sum().backward()
        checkpoint(layer, value.clone().requires_grad_(), use_reentrant=False).sum().backward()
        with torch.no_grad():
            layer(value)
        with pytest.raises(ValueError, match="told to"):
            value.tanh()
        torch.topk(value, 1)
        with pytest.raises(TypeError):
            layer(None)

    own = [value, layer, layer[0], layer[0].weight]
    for tool in (amanda.Tool(), Count(), Scale(), Failing()):
        with amanda.apply(tool):
            if not isinstance(tool, Failing):
                tool.add_inst_for_op(lambda context: None, backward=True)
            run = program if isinstance(tool, Failing) else _without_failing(layer, value)
            check_references(run, 60, own, shared=[torch.relu, nn.Module, native.Watch])


def _without_failing(layer: nn.Module, value: torch.Tensor) -> Any:
    def run() -> None:
        layer.zero_grad()
        layer(value).sum().backward()
        checkpoint(layer, value.clone().requires_grad_(), use_reentrant=False).sum().backward()
        with torch.no_grad():
            layer(value)
        value.T[0].relu()
        value[0] = 1.0

    return run
