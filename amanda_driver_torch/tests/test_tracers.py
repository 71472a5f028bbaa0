"""Compilers, tracers and function transforms beside applied tools."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amanda
from amanda_core.testing.kit.tools import before, watching

from .tensors import Net, close, equal

X = torch.randn(2, 3)


OPS = ["linear", "relu", "linear"]

# torch's own: jit.script, which also backs forward-mode differentiation.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


# Tracers see the program as it is.


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture(params=[False, True], ids=["watching", "editing"])
def applied(request: pytest.FixtureRequest, net: Net) -> Iterator[list[str]]:
    """Run ops under a tool that observes everything and, optionally, one that breaks linears."""
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


def test_export_by_dynamo_alone(net: Net, applied: list[str]) -> None:
    def export() -> Any:
        return torch._dynamo.export(net, aten_graph=True)(X)[0]

    exported = export()
    assert applied == []
    plain = vanilla(export)
    assert exported.code == plain.code
    close(vanilla(lambda: exported(X)), vanilla(lambda: net(X)))


def test_fake_tensors(net: Net, applied: list[str]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        out = net(torch.empty(5, 3))
    assert out.shape == (5, 2)
    assert applied == []
    torch.ones(1)
    assert applied == ["ones"]


# Transforms.


# What runs a program's operators from inside of torch's own machinery.

GRAPH = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)


def force_eager(x: torch.Tensor) -> Any:
    with torch.compiler.set_stance("force_eager"):
        return torch.compile(torch.relu, backend="eager")(x)


RUNNERS: dict[str, tuple[Callable[[torch.Tensor], Any], list[str]]] = {
    "interpreter": (lambda x: torch.fx.Interpreter(GRAPH).run(x), ["relu", "add"]),
    "disabled operator": (lambda x: torch.compiler.disable(torch.relu)(x), ["relu"]),
    "compiled operator that runs eagerly": (force_eager, ["relu"]),
}


@pytest.mark.filterwarnings("ignore:Compiled callables run eagerly")
@pytest.mark.parametrize("name", RUNNERS)
def test_operators_that_machinery_runs_for_a_program(name: str) -> None:
    run, expected = RUNNERS[name]
    seen, watch = watching()
    with amanda.apply(watch):
        got = run(X)
    equal([got], [run(X)])
    assert seen == expected


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
