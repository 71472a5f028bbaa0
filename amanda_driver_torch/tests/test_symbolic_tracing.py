"""Symbolic tracing by torch.fx: proxies are not treated as values, whatever contains them."""

# mypy: allow-untyped-calls

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda

from .tensors import equal

X = torch.randn(2, 3)

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "list": lambda x: torch.cat([x, x * 2]),
    "tuple": lambda x: torch.stack((x, x)),
    "keyword": lambda x: torch.cat(tensors=[x, x], dim=1),
    "keyword tuple": lambda x: torch.stack(dim=1, tensors=(x, x)),
    "with a constant": lambda x: torch.cat([torch.ones(2, 3), x]),
    "several": lambda x: torch.einsum("ij,kj->ik", [x, x]),
    "starred": lambda x: torch.block_diag(x, x, x),
    "index": lambda x: torch.ones(4, 4)[x.long().abs() % 4, 1],
    "slice": lambda x: x[: x.shape[0], ..., None],
    "chunks": lambda x: torch.cat(torch.chunk(x, 3, dim=1), dim=0),
    "grid": lambda x: torch.meshgrid([x[0], x[1]], indexing="ij")[0],
    "where": lambda x: torch.where(x > 0, x, torch.zeros(())),
}


class Module(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


def strict() -> tuple[amanda.Tool, list[str]]:
    """Return a tool whose routines fail unless they get tensors."""
    seen: list[str] = []
    tool = amanda.Tool()

    def check(*values: Any, op: str) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                check(*value, op=op)
            else:
                assert "Proxy" not in type(value).__name__, op
        seen.append(op)

    def before(context: Any) -> None:
        context.insert_before_op(check, op=context.op_type)

    def after(context: Any) -> None:
        context.insert_after_op(check, op=context.op_type)

    tool.add_inst_for_op(before)
    tool.add_inst_for_op(after, require_outputs=True)
    return tool, seen


@pytest.mark.parametrize("ran_before", [False, True], ids=["first", "after it ran"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_symbolic_trace_is_quiet(name: str, ran_before: bool) -> None:
    model = Module(FUNCTIONS[name])
    # Constants become attributes of what is traced.
    expected, plain = model(X), torch.fx.symbolic_trace(copy.deepcopy(model))
    tool, seen = strict()
    with amanda.apply(tool):
        for _ in range(4 * ran_before):
            model(X)
        seen.clear()
        traced = torch.fx.symbolic_trace(model)
        assert seen == []
        got = traced(X)
        assert seen
    assert traced.code == plain.code
    equal(got, expected)


@pytest.mark.parametrize(
    "hold",
    [
        lambda p: torch.cat([p, p]),
        lambda p: torch.cat((p, p)),
        lambda p: torch.cat(tensors=[p, p]),
        lambda p: torch.stack(OrderedDict(tensors=[p, p])["tensors"], dim=0),
        lambda p: torch.broadcast_tensors(p, p),
        lambda p: torch.add(input=p, other=1),
        lambda p: torch.hstack([p, p]),
    ],
    ids=["list", "tuple", "keyword", "from a dict", "starred", "two keywords", "stacked"],
)
def test_proxies_outside_of_a_tracer(hold: Callable[[Any], Any]) -> None:
    """Passes over graphs make proxies without a tracer, here at a place where tensors passed."""
    graph = torch.fx.Graph()
    tool, seen = strict()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxy = torch.fx.Proxy(graph.placeholder("x"), tracer)
    with amanda.apply(tool):
        for value in (X, X, X, X, proxy, X):
            seen.clear()
            result = hold(value)
            assert bool(seen) is (value is X)
            assert value is X or isinstance(result, (torch.fx.Proxy, tuple))


def test_transformer_over_a_graph() -> None:
    model = torch.fx.symbolic_trace(Module(lambda x: torch.cat([x, x])))
    tool, seen = strict()
    with amanda.apply(tool):
        model(X)
        seen.clear()
        again = torch.fx.Transformer(model).transform()
        assert seen == []
    equal(again(X), model(X))


def test_tracing_is_restored() -> None:
    trace = torch.fx.Tracer.trace
    with amanda.apply(amanda.Tool()):
        assert torch.fx.Tracer.trace is not trace
    assert torch.fx.Tracer.trace is trace
