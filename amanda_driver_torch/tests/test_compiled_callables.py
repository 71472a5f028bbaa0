"""Callables under torch.compile that run eagerly while tools are applied, as requested here."""

# mypy: allow-untyped-calls, allow-untyped-decorators
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
from amanda_core.testing.kit.tools import before, watching

from .tensors import Net, equal

X = torch.randn(2, 3)
OPS = ["linear", "relu", "linear"]
EAGERLY = pytest.mark.filterwarnings("ignore:Compiled callables run eagerly")


@pytest.fixture
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AMANDA_TORCH_COMPILED", "eager")
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


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
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
    subprocess.run([sys.executable, "-c", program], check=True)


# With `fullgraph=True` torch raises where nothing was compiled.


def function(x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.relu(x), x)


def whole(target: Any) -> Any:
    return torch.compile(target, backend="eager", fullgraph=True)


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager", fullgraph=True)
    return module


#: Callable -> the operators that a tool sees in it.
WHOLE: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "function": (lambda: whole(function), ["relu", "linear"]),
    "module": (lambda: whole(Net()), OPS),
    "nested modules": (
        lambda: whole(nn.Sequential(nn.Sequential(Net()), nn.ReLU())),
        [*OPS, "relu"],
    ),
    "module compiled in place": (lambda: compiled_in_place(nn.Sequential(Net())), OPS),
    "part of a module": (
        lambda: nn.Sequential(compiled_in_place(Net()), nn.ReLU()),
        [*OPS, "relu"],
    ),
    "callable inside": (lambda: whole(lambda x: whole(function)(x) + 1), ["relu", "linear", "add"]),
    "module method": (lambda: whole(Net().forward), OPS),
}


@EAGERLY
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("warm", [True, False], ids=["compiled-before", "first-called-inside"])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_graphs_run_eagerly(name: str, warm: bool) -> None:
    make, ops = WHOLE[name]
    called = make()
    if warm:
        called(X)
    seen, watch = watching()
    with amanda.apply(watch):
        got = [called(X) for _ in range(2)]
    assert seen == ops * 2
    equal(got, [called(X)] * 2)


@EAGERLY
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", WHOLE)
def test_whole_graphs_while_tools_are_disabled(name: str) -> None:
    make, ops = WHOLE[name]
    called = make()
    expected = called(X)
    torch._dynamo.reset()
    seen, watch = watching()
    with amanda.apply(watch):
        with amanda.disabled():
            got = [called(X)]
        assert seen == []
        got.append(called(X))
        with amanda.disabled():
            got.append(called(X))
    assert seen == ops
    equal([*got, called(X)], [expected] * 4)


@EAGERLY
@pytest.mark.usefixtures("_fresh_compiler")
def test_whole_graph_is_edited() -> None:
    called, x = whole(Net()), X.clone()
    with amanda.apply(before("relu", lambda v: v * 0)):
        edited = called(x)
    equal(edited, called._orig_mod.b(torch.zeros(2, 4)))


@EAGERLY
@pytest.mark.usefixtures("_fresh_compiler")
def test_whole_graph_that_raises() -> None:
    @whole
    def wrong(x: torch.Tensor) -> Any:
        return x.sin() @ x.cos()

    with amanda.apply(amanda.Tool()):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                wrong(X)
        got = whole(function)(X)
    equal(got, function(X))


@EAGERLY
@pytest.mark.usefixtures("_fresh_compiler")
def test_optimizer_that_compiles_its_step() -> None:
    """torchao's low-precision optimizers do so."""

    def update(p: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor) -> None:
        mean.lerp_(grad, 0.1)
        p.sub_(mean, alpha=0.5)

    class Compiling(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                torch.compile(update, backend="eager", fullgraph=True, dynamic=False)(
                    p.detach(), p.grad, mean
                )

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net()
        optimizer = Compiling(net.parameters(), {})
        for _ in range(3):
            net(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in net.parameters()]

    expected = train()
    seen, watch = watching()
    with amanda.apply(watch):
        got = train()
    equal(got, expected)
    assert seen.count("lerp_") == 12


# What compiles inside of itself.


def attention(mask: bool = False) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.linspace(-1, 1, 256).reshape(1, 2, 16, 8)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, "cpu")
    return flex_attention(
        q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j), block_mask=blocks if mask else None
    )


def loop() -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), X))


def scanned() -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, x: (c + x, c * x), torch.zeros(3), X)


def associatively() -> Any:
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(lambda a, b: a + b, X, 0, combine_mode="generic")


def mapped() -> Any:
    from torch._higher_order_ops.map import map as map_

    return map_(lambda x, *_: x.sin(), X)


def chosen() -> Any:
    # It is differentiated by functions that return several values.
    x = X.clone().requires_grad_()
    y = torch.cond(X.sum() > 0, lambda v: v.sin() * 2, lambda v: v.cos(), (x,))
    return y.detach(), *torch.autograd.grad(y.sum(), x)


@EAGERLY
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:Operators inside torch.func transforms")
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("program", "op"),
    [
        (attention, "flex_attention"),
        (lambda: attention(mask=True), "flex_attention"),
        (lambda: torch.cond(X.sum() > 0, torch.sin, torch.cos, (X,)), "cond"),
        (chosen, "cond"),
        (loop, "while_loop"),
        (scanned, "scan"),
        (associatively, "stack"),
        (mapped, "map_impl"),
    ],
    ids=[
        "attention",
        "masked attention",
        "cond",
        "trained cond",
        "while",
        "scan",
        "associative scan",
        "map",
    ],
)
@pytest.mark.parametrize("setting", ["eager", "graph"])
def test_higher_order_operators(
    program: Callable[[], Any], op: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_COMPILED", setting)
    expected = program()
    seen, watch = watching()
    with amanda.apply(watch):
        got = program()
    equal(got, expected)
    assert op in seen
