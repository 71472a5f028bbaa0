"""Higher-order operators and transforms of functions in compiled graphs, which stay compiled."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda

from .interceptors import STAYS_COMPILED
from .tensors import close, leaf_copy

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.usefixtures("fresh_compiler"),
    # A callable that runs eagerly would show nothing.
    pytest.mark.filterwarnings("error::amanda.AmandaWarning"),
    pytest.mark.filterwarnings("ignore:Operators inside torch.func transforms"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Of torch's own.
    STAYS_COMPILED,
]

X = torch.linspace(-1, 1, 256).reshape(1, 2, 16, 8)
WEIGHT = nn.Parameter(torch.linspace(1, 2, 64).reshape(8, 8))


# Each program calls `changed` with the result of the operator that the tool changes.


def chosen(x: torch.Tensor, changed: Any) -> Any:
    return changed(torch.cond(x.sum() > 0, torch.sin, lambda v: v @ WEIGHT, (x * 2,))) * 3


def attention(x: torch.Tensor, changed: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return changed(flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + (i - j))) * 3


def looped(x: torch.Tensor, changed: Any) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    with torch.no_grad():
        start = torch.zeros((), dtype=torch.int64)
        count, y = while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (start, x * 2))
    return changed(y) * 3 + count


def mapped(x: torch.Tensor, changed: Any) -> Any:
    from torch._higher_order_ops.map import map as map_

    return changed(map_(lambda v, *_: v.sin() @ WEIGHT, x[0] * 2)) * 3


def scanned(x: torch.Tensor, changed: Any) -> Any:
    from torch._higher_order_ops.scan import scan

    return changed(scan(lambda c, v: (c + v, c * v), x[0, 0, 0] * 0, x[0, 0] * 2)[1]) * 3


def vectorized(x: torch.Tensor, changed: Any) -> Any:
    return changed(torch.vmap(lambda v: v.sin() @ WEIGHT)(x).tanh()) * 3


def gradients_of_samples(x: torch.Tensor, changed: Any) -> Any:
    found = torch.vmap(torch.func.grad(lambda v: (v.sin() @ WEIGHT).prod(-1).sum()))(x)
    return changed(found.tanh()) * 3


def jacobians(x: torch.Tensor, changed: Any) -> Any:
    return changed(torch.func.jacrev(lambda v: v.sin() @ WEIGHT)(x[0, 0, 0]).tanh()) * 3


PROGRAMS: dict[str, tuple[Callable[[torch.Tensor, Any], Any], str]] = {
    "cond": (chosen, "cond"),
    "attention": (attention, "flex_attention"),
    "while": (looped, "while_loop"),
    "map": (mapped, "map_impl"),
    "scan": (scanned, "scan"),
    "vmap": (vectorized, "tanh"),
    "vmap of grad": (gradients_of_samples, "tanh"),
    "jacrev": (jacobians, "tanh"),
}


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "host"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_edited(name: str, backend: str, staged: bool) -> None:
    program, op = PROGRAMS[name]

    def edited(*values: torch.Tensor) -> list[torch.Tensor]:
        return [value * 2 if value.is_floating_point() else value for value in values]

    routine = amanda.staged(edited) if staged else edited
    seen: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        seen.append(context.op_type)
        if context.op_type == op:
            context.insert_after_op(routine)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    given, twin = leaf_copy(X), leaf_copy(X)
    if program is attention:  # It has no backward on the CPU.
        given, twin = X, X
    # The gradient is that of the value which was there before.
    twins = program(twin, lambda value: value + value.detach())
    compiled = torch.compile(lambda x: program(x, lambda value: value), backend=backend)
    with amanda.apply(tool):
        found = compiled(given)
    if twins.requires_grad:
        found.sum().backward()
        twins.sum().backward()
    close((found, given.grad), (twins, twin.grad))
    assert seen.count(op) == 1
    assert "mul" in seen
    assert {"sin", "__matmul__", "new_zeros"}.isdisjoint(seen)
