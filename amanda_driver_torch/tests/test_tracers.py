"""Compilers, tracers and function transforms beside applied tools."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core.testing.tools import before, watching

from .making import close, equal

X = torch.randn(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.relu(self.a(x)))


OPS = ["linear", "relu", "linear"]

# torch's own: jit.script, which also backs forward-mode differentiation.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


# Compiled callables run eagerly.


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_counting(target: Any) -> tuple[Any, list[int]]:
    compilations: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(1)
        return graph

    return torch.compile(target, backend=backend), compilations


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("warm", [True, False], ids=["compiled-before", "first-called-inside"])
@pytest.mark.parametrize("make", [Net, lambda: lambda x: F.linear(F.relu(x), x)])
def test_compiled_callable_runs_eagerly_with_one_notice(warm: bool, make: Any) -> None:
    target = make()
    compiled, compilations = compile_counting(target)
    if warm:
        compiled(X)
    seen, watch = watching()
    with pytest.warns(amanda.AmandaWarning, match="eagerly") as caught, amanda.apply(watch):
        out = [compiled(X) for _ in range(2)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert seen == (OPS if isinstance(target, Net) else ["relu", "linear"]) * 2
    assert len(compilations) == warm
    equal(out, [target(X)] * 2)
    seen.clear()
    equal(compiled(X), target(X))
    assert len(compilations) == 1, "compiled again after the tools were left"
    assert seen == []


@pytest.mark.usefixtures("_fresh_compiler")
def test_module_compiled_in_place_runs_eagerly() -> None:
    net = Net()
    net.compile(backend="eager")
    net(X)
    seen, watch = watching()
    with pytest.warns(amanda.AmandaWarning, match="eagerly"), amanda.apply(watch):
        net(X)
    assert seen == OPS


def test_compiler_imported_while_applied_is_covered() -> None:
    program = """
import sys, warnings, torch, amanda
assert "torch._dynamo" not in sys.modules
seen = []
tool = amanda.Tool()
tool.add_inst_for_op(lambda c: c.insert_before_op(lambda *v, name=c.op_type: seen.append(name)))
x = torch.ones(2)
with warnings.catch_warnings(record=True) as caught, amanda.apply(tool):
    warnings.simplefilter("always")
    f = torch.compile(lambda x: x.exp() + 1, backend="eager")
    f(x), f(x)
assert seen == ["exp", "add"] * 2, seen
ours = [w for w in caught if issubclass(w.category, amanda.AmandaWarning)]
assert len(ours) == 1, [str(w.message) for w in caught]
assert torch._dynamo.eval_frame._callback_from_stance.__module__ == "torch._dynamo.eval_frame"
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


# Tracers see the program as it is.


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture(params=[False, True], ids=["watching", "editing"])
def applied(request: pytest.FixtureRequest, net: Net) -> Iterator[list[str]]:
    """Ops that run while a tool watches everything and, perhaps, one breaks every linear."""
    seen, watch = watching()
    tools = [watch, before("linear", lambda w: w * 0, [1])] if request.param else [watch]
    handle = amanda.attach(*tools)
    try:
        yield seen
    finally:
        handle.remove()


def vanilla(program: Callable[[], Any]) -> Any:
    with amanda.disabled():
        return program()


def test_jit_trace(net: Net, applied: list[str]) -> None:
    traced = torch.jit.trace(net, X)
    assert applied == []
    close(vanilla(lambda: traced(X)), vanilla(lambda: net(X)))


def test_jit_script(net: Net, applied: list[str]) -> None:
    scripted = torch.jit.script(net)
    assert applied == []
    close(vanilla(lambda: scripted(X)), vanilla(lambda: net(X)))


def test_fx_symbolic_trace(net: Net, applied: list[str]) -> None:
    traced = torch.fx.symbolic_trace(net)
    assert applied == []
    assert traced.code == vanilla(lambda: torch.fx.symbolic_trace(net)).code
    traced(X)
    assert applied == OPS


def test_make_fx(applied: list[str]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.relu(x), x) + 1

    traced = make_fx(function)(X)
    assert applied == []
    assert traced.code == vanilla(lambda: make_fx(function)(X)).code


@pytest.mark.parametrize("strict", [False, True])
def test_export(net: Net, applied: list[str], strict: bool) -> None:
    exported = torch.export.export(net, (X,), strict=strict)
    assert applied == []
    close(vanilla(lambda: exported.module()(X)), vanilla(lambda: net(X)))


def test_fake_tensors(net: Net, applied: list[str]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        out = net(torch.empty(5, 3))
    assert out.shape == (5, 2)
    assert applied == []
    torch.ones(1)
    assert applied == ["ones"]


# Transforms.


def test_function_transforms_are_right_and_named_in_one_notice() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    def program() -> list[Any]:
        vmapped = torch.func.vmap(function)(X)
        return [
            vmapped,
            torch.func.grad(function)(X),
            torch.func.vmap(torch.func.grad(function))(X),
        ]

    expected = program()
    seen, watch = watching()
    with (
        pytest.warns(amanda.AmandaWarning, match=r"torch\.func") as caught,
        amanda.apply(watch, before("sin", lambda x: x * 0)),
    ):
        got = program()
    assert len(caught) == 1
    assert "sin" not in seen
    equal(got, expected)


def test_edit_carries_the_tangent_of_the_old_value() -> None:
    import torch.autograd.forward_ad as forward_ad

    for grad in (True, False):
        x = torch.randn(3, requires_grad=grad)
        with amanda.apply(before("sin", lambda v: v * 1.5)), forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones(3))
            tangent = forward_ad.unpack_dual(torch.sin(dual)).tangent
        close(tangent, torch.cos(x * 1.5))
