"""A module whose `forward` is called is there as if it was called itself."""

# mypy: allow-untyped-calls, allow-untyped-defs, disable-error-code="no-any-return"
# Programs here are written as users write them.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.testing.kit.tools import tool

X = torch.ones(1, 4, 8)


class Attention(nn.Module):
    def __init__(this) -> None:
        super().__init__()
        this.q = nn.Linear(8, 8, bias=False)

    def forward(this, x: torch.Tensor) -> torch.Tensor:
        q = this.q(x)
        return torch.softmax(q @ q.mT, -1) @ x


class Scaled(Attention):
    def forward(layer, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mul(2)


class Captured(Attention):
    def forward(m, x: torch.Tensor) -> torch.Tensor:
        return (lambda: m.q(x).exp())()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Scaled(), Attention(), Captured()])
        self.norm = nn.LayerNorm(8)


def by_call(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = x + layer(self.norm(x))
    return x.tanh()


def by_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = x + layer.forward(self.norm(x))
    return x.tanh()


def by_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = x + getattr(layer, "for" + "ward")(self.norm(x))
    return x.tanh()


def called(net: Any) -> Any:
    return net(X)


def forwarded(net: Any) -> Any:
    return net.forward(X)


def models(*forwards: Callable[..., Any]) -> list[Any]:
    return [type("Model", (Block,), {"forward": forward}) for forward in forwards]


def executed(net: nn.Module, run: Callable[[Any], Any], times: int = 2) -> dict[Any, int]:
    found: dict[Any, int] = {}

    def look(context: amanda.OpContext) -> None:
        key = context.module_path, context.op_type

        def count(*_: Any) -> None:
            found[key] = found.get(key, 0) + 1

        context.insert_before_op(count, observe=True)

    with amanda.apply(tool(look)):
        for _ in range(times):
            run(net)
    return found


@pytest.mark.parametrize("forward", [by_call, by_forward, by_name])
@pytest.mark.parametrize("run", [called, forwarded])
def test_paths_are_those_of_calls(forward: Any, run: Any) -> None:
    reference, kind = models(by_call, forward)
    assert executed(kind(), run) == executed(reference(), called)


def events(net: nn.Module, run: Callable[[Any], Any]) -> list[tuple[str, str]]:
    log: list[tuple[str, str]] = []
    scopes = amanda.Tool()
    scopes.add_inst_for_scope(
        lambda path: log.append(("enter", path)), lambda path: log.append(("leave", path))
    )
    with amanda.apply(scopes):
        run(net)
        run(net)
    return log


def test_scopes_are_entered_and_left() -> None:
    reference, kind = models(by_call, by_forward)
    expected = events(reference(), called)
    assert ("enter", "layers.3") in expected
    assert events(kind(), called) == expected


def test_classes_are_as_found_afterwards() -> None:
    (kind,) = models(by_forward)
    before = {one: vars(one).get("forward") for one in (kind, Attention, Scaled, nn.Conv2d)}
    with amanda.apply(tool(lambda context: None)):
        kind().forward(X)
        assert vars(Attention)["forward"] is not before[Attention]
        # What the model does not have is left alone.
        assert vars(nn.Conv2d)["forward"] is before[nn.Conv2d]
    assert {one: vars(one).get("forward") for one in before} == before


PROGRAM = """
class Base(nn.Module):
    def forward(self, x): return x.exp()

class Part(Base):
    def forward(self, x): return super().forward(x)

class Described(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def describe(self): return self.part.forward.__name__

    def forward(self, x): return self.part(x)

kinds = Base, Part, Described
before = [vars(kind)["forward"] for kind in kinds]
with amanda.apply(observer):
    Described()(X)
    during = [vars(kind)["forward"] for kind in kinds]
"""


def test_programs_without_such_calls_have_nothing_replaced() -> None:
    names: dict[str, Any] = {"nn": nn, "amanda": amanda, "X": X, "__name__": "program"}
    names["observer"] = tool(lambda context: None)
    exec(PROGRAM, names)
    assert names["during"] == names["before"]


def test_a_call_that_began_before_it_was_known_is_said() -> None:
    source = """
class Inner(nn.Module):
    def forward(self, x): return x.exp()

with amanda.apply(observer):
    for _ in range(2): getattr(Inner(), "for" + "ward")(X)
"""
    log: list[str] = []
    observer = amanda.Tool()
    observer.add_inst_for_scope(log.append)
    names: dict[str, Any] = {"nn": nn, "amanda": amanda, "X": X, "__name__": "program"}
    with pytest.warns(amanda.AmandaWarning, match="forward of Inner was called, and not the"):
        exec(source, {**names, "observer": observer})
    assert log == [""]


@pytest.mark.filterwarnings("ignore:Compiled callables run eagerly")
def test_a_replaced_forward_can_be_scripted_and_compiled() -> None:
    class Scripted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return helper(x) + 1

    net = Scripted()
    with amanda.apply(tool(lambda context: None)):
        net.forward(X)
        script = torch.jit.script(net)
        assert torch.equal(script(X), X * 2 + 1)
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), X * 2 + 1)
    torch._dynamo.reset()


@torch.jit.script
def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_helper_called_inside_and_outside_is_two_operators() -> None:
    def shared(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return shared(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.forward(x)

    def run(net: Any) -> None:
        net.forward(X)
        shared(X)

    assert executed(Outer(), run, 1) == {("inner", "exp"): 1, ("", "exp"): 1}
    assert executed(Outer(), run, 3) == {("inner", "exp"): 3, ("", "exp"): 3}


def test_a_class_without_modules_named_forward_is_not_one() -> None:
    class Plain:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    assert executed(nn.Identity(), lambda net: Plain().forward(net(X))) == {("", "exp"): 2}
