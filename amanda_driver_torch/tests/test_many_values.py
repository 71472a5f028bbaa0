"""Operators with any number of inputs, outputs, arguments and gradients, under routines at all."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.errors import PositionError
from amanda_core.testing.kit.tools import Edit, after, at_inputs, at_outputs, before, editing

from .interceptors import under_both_interceptors
from .tensors import equal
from .unchanged_by_tools import CHANGING_NOTHING, same_under

#: Around what the native interceptor calls routines with on its stack, and far beyond.
COUNTS = (15, 16, 17, 23, 24, 25, 26, 40, 600)


def clipped(count: int) -> Any:
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(3)
    return nn.utils.clip_grad_norm_(parameters, 1.0), [p.grad for p in parameters]


def unbound(count: int) -> Any:
    x = torch.randn(count, 3, requires_grad=True)
    sum((row * row).sum() for row in x.unbind()).backward()  # type: ignore[union-attr]
    return x.grad


def split(count: int) -> Any:
    x = torch.randn(count, 3, requires_grad=True)
    torch.cat([part.exp() for part in x.split(1)]).sum().backward()
    return x.grad


def iterated(count: int) -> Any:
    x = torch.randn(count, 3, requires_grad=True)
    torch.stack([row * 2 for row in x]).sum().backward()
    return x.grad


def of_a_function(count: int) -> Any:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: torch.Tensor) -> Any:
            return tuple(value * 2 for value in values)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return tuple(grad * 2 for grad in grads)

    leaves = [torch.ones(2, requires_grad=True) for _ in range(count)]
    sum(value.sum() for value in Sum.apply(*leaves)).backward()
    return [one.grad for one in leaves]


def broadcast(count: int) -> Any:
    return torch.broadcast_tensors(*[torch.ones(2, 1), torch.ones(1, 3)] * (count // 2 + 1))


def many_dimensions(count: int) -> Any:
    x = torch.ones((1,) * min(count, 60))
    return x.permute(*reversed(range(x.dim()))).reshape(*x.shape, 1).sum()


PROGRAMS = [clipped, unbound, split, iterated, of_a_function, broadcast, many_dimensions]


@under_both_interceptors
@pytest.mark.parametrize("tool", sorted(set(CHANGING_NOTHING) - {"empty", "watching"}))
@pytest.mark.parametrize("program", PROGRAMS)
def test_any_number_of_values(
    program: Callable[[int], Any],
    tool: str,
    interceptor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", interceptor)
    for count in (24, 25):
        same_under(tool, lambda count=count: program(count))  # type: ignore[misc]


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("tool", CHANGING_NOTHING)
@pytest.mark.parametrize("program", PROGRAMS)
def test_any_number_of_values_at_all_limits(
    program: Callable[[int], Any], tool: str, count: int
) -> None:
    same_under(tool, lambda: program(count))


@pytest.mark.parametrize("count", COUNTS)
def test_routines_get_all_values_and_may_change_any(count: int) -> None:
    seen: list[int] = []

    def double_the_last(*values: Any) -> Any:
        seen.append(len(values))
        return (*values[:-1], values[-1] * 2)

    x = torch.ones(count, 2)
    with amanda.apply(after("unbind", double_the_last)):
        for _ in range(3):
            rows = x.unbind()
            equal(torch.stack(rows[:-1]), torch.ones(count - 1, 2))
            equal(rows[-1], torch.full((2,), 2.0))
    assert seen == [count] * 3


@pytest.mark.parametrize("count", [3, 12, 13, 23, 24, 25, 60])
def test_a_routine_takes_any_number_of_keywords(count: int) -> None:
    given: Any = {f"keyword_{i}": i for i in range(count)}
    seen: list[int] = []

    def routine(*values: Any, **kwargs: int) -> None:
        seen.append(len(values) + sum(kwargs.values()))

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "unbind":
            context.insert_after_op(routine, **given)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        for _ in range(3):
            torch.ones(30, 2).unbind()
    assert seen == [30 + sum(range(count))] * 3


def test_gradients_of_many_outputs_and_inputs() -> None:
    seen: list[int] = []

    def count(*grads: Any) -> None:
        seen.append(sum(isinstance(grad, torch.Tensor) for grad in grads))

    for tool in (at_outputs("split", count), at_inputs("cat", lambda *g: count(*g[0]))):
        seen.clear()
        with amanda.apply(tool):
            for _ in range(3):
                x = torch.ones(30, 2, requires_grad=True)
                torch.cat([part * 2 for part in x.split(1)]).sum().backward()
        assert seen == [30] * 3


def test_before_and_edits_of_lists() -> None:
    parts = [torch.full((1,), float(i)) for i in range(40)]
    edit = Edit("cat", "before", lambda tensors: [tensor + 1 for tensor in tensors], 0)
    with amanda.apply(editing(edit), before("cat", lambda *values: None)):
        for _ in range(3):
            equal(torch.cat(parts), torch.arange(1.0, 41.0))


@pytest.mark.parametrize("observe", [True, False])
def test_outputs_that_a_later_execution_lacks_are_left_out(observe: bool) -> None:
    seen: list[tuple[str, list[int], int]] = []

    def note(what: str, positions: list[int], *values: object) -> None:
        seen.append((what, positions, len(values)))

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type != "split":
            return
        for positions in ([2], [0]):
            context.insert_after_op(
                functools.partial(note, "output", positions), outputs=positions, observe=observe
            )
            context.insert_before_backward_op(
                functools.partial(note, "gradient", positions),
                grad_outputs=positions,
                observe=observe,
            )

    tool, expected = amanda.Tool(), []
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        for length in (6, 6, 4, 4, 6, 6):
            parts: Any = torch.split(torch.ones(length, requires_grad=True), 2)
            torch.cat(parts).sum().backward()
            there = [[2], [0]] if len(parts) > 2 else [[0]]
            expected += [(what, one, 1) for what in ("output", "gradient") for one in there]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("observe", [True, False])
def test_an_editor_that_lacks_some_of_its_outputs_is_refused(observe: bool) -> None:
    seen: list[int] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "split":
            context.insert_after_op(
                lambda *values: seen.append(len(values)), outputs=[0, 2], observe=observe
            )

    tool, x = amanda.Tool(), torch.ones(6)
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        for given in [x, x, x[:4]] if observe else [x, x]:
            split_in_twos(given)
        if not observe:
            with pytest.raises(PositionError, match="Position 2 was requested, but there are 2"):
                split_in_twos(x[:4])
        split_in_twos(x)
    assert seen == [2, 2, 2]


def split_in_twos(x: torch.Tensor) -> None:
    torch.split(x, 2)
