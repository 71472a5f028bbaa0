"""Leaving restores torch as it was found, by whatever way, and the model as it was."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
import torch._higher_order_ops
import torch._tensor_str
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import get_gradient_edge

import amanda
from amanda_core.testing.kit.tools import (
    Everywhere,
    after,
    at_inputs,
    at_outputs,
    before,
    replacing,
    replacing_backward,
    tool,
    watching,
)

from .tensors import equal

OWNERS: list[Any] = [
    *(
        importlib.import_module(name)
        for name in (
            "torch",
            "torch._tensor",
            "torch._tensor_str",
            "torch._ops",
            "torch._jit_internal",
            "torch.functional",
            "torch.overrides",
            "torch.linalg",
            "torch.nn.functional",
            "torch.nn.init",
            "torch.autograd",
            "torch.autograd.function",
            "torch.autograd.graph",
            "torch.autograd.variable",
            "torch.jit",
            "torch.nn.modules.module",
            "torch.optim.optimizer",
            "torch.utils.checkpoint",
            "torch._dynamo.eval_frame",
            "torch.library",
            "torch.jit._trace",
            "torch.export",
        )
    ),
    torch.Tensor,
    torch._C.TensorBase,
    torch._C.ScriptFunction,
    torch._C.ScriptMethod,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
    torch.autograd.Function,
    importlib.import_module("torch.autograd.variable").Variable,
    torch.utils.checkpoint.CheckpointFunction,
    torch.library.CustomOpDef if hasattr(torch.library, "CustomOpDef") else torch.Tensor,
    nn.Module,
    nn.Linear,
]
BINDERS = (staticmethod, classmethod, types.MethodType)


def fingerprint() -> dict[str, Any]:
    """Return everything that the driver could have left changed."""
    found: dict[str, Any] = {}
    for owner in OWNERS:
        for name, value in list(vars(owner).items()):
            found[f"{owner.__name__}.{name}"] = id(value)
            function = value.__func__ if isinstance(value, BINDERS) else value
            if isinstance(function, types.FunctionType):
                found[f"{owner.__name__}.{name} code"] = id(function.__code__)
    hooks = torch.nn.modules.module
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    found["modes"] = torch._C._len_torch_function_stack()
    found["dispatch modes"] = torch._C._len_torch_dispatch_stack()
    found["meta path"] = [id(finder) for finder in sys.meta_path]
    found["module hooks"] = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    found["optimizer hooks"] = (
        len(optimizer._global_optimizer_post_hooks),
        len(optimizer._global_optimizer_pre_hooks),
    )
    found["saved tensors"] = torch._C._autograd._top_saved_tensors_default_hooks(True)
    found["grad"] = torch.is_grad_enabled()
    return found


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


MODEL = model()
X = torch.randn(2, 3)


def work() -> None:
    """Use a bit of everything that the driver replaces."""
    MODEL(X).sum().backward()
    again = torch.utils.checkpoint.checkpoint(MODEL, X, use_reentrant=False)
    str(again)
    torch.nn.functional.normalize(again).sum().backward()
    torch.optim.SGD(MODEL.parameters(), 0.0).step()


class Boom(Exception):
    pass


def boom(*values: Any) -> Any:
    raise Boom


def interrupt(*values: Any) -> Any:
    raise KeyboardInterrupt


def failing_analyses() -> list[amanda.Tool]:
    return [
        tool(boom, "relu", backward=backward, require_outputs=late)
        for backward in (False,)
        for late in (False, True)
    ] + [tool(boom, "ReluBackward0", backward=True, require_outputs=late) for late in (False, True)]


WAYS: dict[str, Callable[[], amanda.Tool]] = {
    "routine-before": lambda: before("relu", boom),
    "routine-after": lambda: after("relu", boom),
    "replacement": lambda: replacing("relu", boom),
    "gradient-of-output": lambda: at_outputs("relu", boom),
    "gradient-of-input": lambda: at_inputs("relu", boom, [0]),
    "replaced-backward": lambda: replacing_backward("relu", boom),
    "raw-before": lambda: tool(
        lambda c: c.insert_before_backward_op(boom), "ReluBackward0", backward=True
    ),
    "raw-after": lambda: tool(
        lambda c: c.insert_after_backward_op(boom), "ReluBackward0", backward=True
    ),
    "raw-replacement": lambda: tool(
        lambda c: c.replace_backward_op(boom), "ReluBackward0", backward=True
    ),
    "accumulation": lambda: tool(
        lambda c: c.insert_before_backward_op(boom), "AccumulateGrad", backward=True
    ),
    "analysis-before": lambda: failing_analyses()[0],
    "analysis-after": lambda: failing_analyses()[1],
    "backward-analysis-before": lambda: failing_analyses()[2],
    "backward-analysis-after": lambda: failing_analyses()[3],
}


def everything() -> amanda.Tool:
    return Everywhere(lambda *values: None)


@pytest.fixture
def found() -> dict[str, Any]:
    work()  # What torch sets up lazily is there already.
    with amanda.apply(everything()):
        work()
    return fingerprint()


def differences(found: dict[str, Any]) -> dict[str, Any]:
    now = fingerprint()
    return {key: now.get(key) for key in {*now, *found} if now.get(key) != found.get(key)}


def test_fingerprint_differs_while_tools_are_applied(found: dict[str, Any]) -> None:
    with amanda.apply(everything()):
        changed = differences(found)
        assert "Module.__call__" in changed
        # From torch 2.14 on it is a class method in C, and what it points to is exchanged.
        if isinstance(vars(torch.autograd.Function)["apply"], classmethod):
            assert "Function.apply code" in changed
    assert differences(found) == {}


def test_restored_after_the_very_first_use() -> None:
    start = fingerprint()
    with amanda.apply(everything()):
        pass
    assert differences(start) == {}


@pytest.mark.parametrize("way", WAYS)
def test_restored_after_an_exception(found: dict[str, Any], way: str) -> None:
    plain = MODEL(X)
    with pytest.raises(Boom), amanda.apply(everything(), WAYS[way]()):
        work()
    assert differences(found) == {}
    equal(MODEL(X), plain)
    work()


@pytest.mark.parametrize("make", [before, at_outputs, replacing_backward])
def test_restored_after_an_interrupt(found: dict[str, Any], make: Any) -> None:
    with pytest.raises(KeyboardInterrupt), amanda.apply(make("relu", interrupt)):
        work()
    assert differences(found) == {}
    work()


def test_restored_after_an_exception_of_the_program(found: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), amanda.apply(everything()):
        MODEL(torch.ones(1, 5))
    assert differences(found) == {}


def test_restored_after_nesting(found: dict[str, Any]) -> None:
    with amanda.apply(everything()):
        with amanda.apply(everything()):
            work()
        assert differences(found) != {}
        work()
    assert differences(found) == {}


def test_restored_when_handles_are_removed_out_of_order(found: dict[str, Any]) -> None:
    handles = [amanda.attach(everything()) for _ in range(3)]
    for index in (1, 0, 2):
        work()
        assert differences(found) != {}
        handles[index].remove()
        handles[index].remove()
    assert differences(found) == {}


def test_restored_when_a_handle_comes_and_goes_inside_a_module(found: dict[str, Any]) -> None:
    handles: list[amanda.Handle] = []

    class Attaching(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            handles.append(amanda.attach(everything()))
            return MODEL(x)

    class Removing(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            handles.pop().remove()
            return MODEL(x)

    nn.Sequential(Attaching(), nn.Linear(2, 3), Removing())(X)
    assert differences(found) == {}
    handles.append(amanda.attach(everything()))
    Removing()(X)
    assert differences(found) == {}
    work()


def test_restored_when_two_threads_overlap(found: dict[str, Any]) -> None:
    inside, leave = threading.Event(), threading.Event()
    seen, watch = watching()

    def other() -> None:
        with amanda.apply(watch):
            inside.set()
            leave.wait(30)
            MODEL(X)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    with amanda.apply(everything()):
        work()
    leave.set()
    thread.join()
    assert seen == ["linear", "relu", "linear"]
    assert differences(found) == {}


def test_restored_when_a_thread_ends_with_tools_applied(found: dict[str, Any]) -> None:
    handles: list[amanda.Handle] = []

    def other() -> None:
        handles.append(amanda.attach(everything()))
        work()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert differences(found) == {}
    handles.pop().remove()  # There is nothing left to restore.
    with amanda.apply(everything()):
        work()
    assert differences(found) == {}


def test_nothing_hangs_on_parameters(found: dict[str, Any]) -> None:
    net = model()
    nodes: list[Any] = [get_gradient_edge(p).node for p in net.parameters()]
    with amanda.apply(everything()):
        net(X).sum().backward()
        assert any(node.metadata for node in nodes)
    assert not any(node.metadata for node in nodes)
    assert not any(p._backward_hooks for p in net.parameters())
    assert not any(vars(module).get("_forward_hooks") for module in net.modules())


# The model is what it was.


def test_model_runs_as_before() -> None:
    net = model()
    plain = net(X)
    with amanda.apply(before("linear", lambda w: w * 0, [1])):
        net(X)
    seen, watch = watching()
    with amanda.apply(watch):
        pass
    equal(net(X), plain)
    assert seen == []


def test_model_calls_no_function_of_ours_once_left() -> None:
    net, ours = model(), list[str]()
    with amanda.apply(everything()):
        net(X).sum().backward()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("amanda"):
            ours.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        net(X).sum().backward()
    finally:
        sys.setprofile(None)
    assert [name for name in ours if "test_" not in name] == []
