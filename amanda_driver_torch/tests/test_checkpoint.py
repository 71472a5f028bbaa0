"""Activation checkpointing: recomputation applies the same edits, as the same ops, flagged."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import after, at_inputs, before, tool

from .tensors import close, equal, grad_of, leaf, leaf_copy

VARIANTS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved-tensors"])

# A reentrant checkpoint inside another one gets inputs without gradients in its first run.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def gradients(model: nn.Module, *others: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients and clear them."""
    tensors = [*model.parameters(), *others]
    found = [grad_of(tensor) for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found


class Executions(list[tuple[int, bool]]):
    """Op ids in the order of execution, each with whether it was a recomputation."""

    def of(self, op_type: str) -> amanda.Tool:
        def analyse(context: amanda.OpContext) -> None:
            context.insert_before_op(
                lambda *values: self.append((context.get_op_id(), context.recomputed))
            )

        return tool(analyse, op_type)

    @property
    def first(self) -> list[int]:
        return [op_id for op_id, recomputed in self if not recomputed]

    @property
    def again(self) -> list[int]:
        return [op_id for op_id, recomputed in self if recomputed]


@VARIANTS
def test_gradients_are_those_of_the_edited_model_without_checkpoint(reentrant: bool) -> None:
    model, x = small(), leaf(5, 3)
    tools = before("linear", double, [1]), after("tanh", lambda v: v + 1)
    with amanda.apply(*tools):
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        got = gradients(model, x)
        model(x).square().sum().backward()
    equal(got, gradients(model, x))


@VARIANTS
def test_recomputation_is_flagged_and_has_the_same_op_ids(reentrant: bool) -> None:
    model, x, seen = small(), leaf(5, 3), Executions()
    with amanda.apply(seen.of("linear")):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert seen.first == seen.again
        assert len(set(seen.first)) == 2
        checkpointed = list(seen.first)
        seen.clear()
        model(x)
    assert seen == [(op_id, False) for op_id in checkpointed]


@VARIANTS
def test_aligned_gradients_of_checkpointed_ops(reentrant: bool) -> None:
    model, x = small(), leaf(5, 3)
    with amanda.apply(at_inputs("linear", double, [1])):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    got = gradients(model)
    model(x).sum().backward()
    weight1, bias1, weight2, bias2 = gradients(model)
    equal(got, [2 * weight1, bias1, 2 * weight2, bias2])


@VARIANTS
def test_backward_ops_of_checkpointed_ops_run_once(reentrant: bool) -> None:
    model, x, names = small(), leaf(5, 3), list[str]()

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *grads: names.append(context.name))

    with amanda.apply(tool(analyse, "AddmmBackward0", backward=True)):
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert names == ["2/linear:AddmmBackward0", "0/linear:AddmmBackward0"] * 2


@VARIANTS
def test_plain_function_called_in_a_loop_of_one_module(reentrant: bool) -> None:
    class Loop(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = checkpoint(lambda v: v.sin() * v, x, use_reentrant=reentrant)
            return x

    scale = iter([2.0, 3.0, 5.0])

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(lambda v, by: v * by, inputs=[0], by=next(scale))

    x, seen = leaf(3), Executions()
    with amanda.apply(seen.of("sin"), tool(analyse, "sin")):
        Loop()(x).sum().backward()
    assert len(set(seen.first)) == 3
    assert seen.again == seen.first[::-1]
    y = leaf_copy(x)
    value = y
    for by in (2.0, 3.0, 5.0):
        # Straight through: the slope of sin where it was taken, without that of the scaling.
        inner = value * by
        value = (value + (inner - value).detach()).sin() * value
    value.sum().backward()
    close(grad_of(x), grad_of(y))


@VARIANTS
def test_nested_checkpoints(reentrant: bool) -> None:
    model, x, seen = small(), leaf(5, 3), Executions()

    def inner(value: torch.Tensor) -> Any:
        return model[2](model[1](value))

    def outer(value: torch.Tensor) -> Any:
        return checkpoint(inner, model[0](value), use_reentrant=reentrant)

    with amanda.apply(before("linear", double, [1]), seen.of("linear")):
        checkpoint(outer, x, use_reentrant=reentrant).square().sum().backward()
        got = gradients(model, x)
        assert len(set(seen.first)) == 2
        assert set(seen.again) == set(seen.first)
        model(x).square().sum().backward()
    equal(got, gradients(model, x))


@pytest.fixture
def _deep_stack() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("_deep_stack")
def test_recursion_too_deep_for_one_thread() -> None:
    depth, threads = 75, set[int]()
    w = nn.Parameter(torch.tensor(1.01, dtype=torch.float64))

    def routine(value: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        return value * 1.01

    def step(value: torch.Tensor, left: int) -> Any:
        value = value * w
        return checkpoint(step, value, left - 1, use_reentrant=True) if left else value

    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    with amanda.apply(before("mul", routine, [1])):
        checkpoint(step, x, depth, use_reentrant=True).backward()
    assert len(threads) > 1, "deep enough to leave the thread"
    edited, times = 1.01 * 1.01, depth + 1
    close(grad_of(x), torch.tensor([edited**times], dtype=torch.float64))
    wanted = times * edited ** (times - 1)
    close(grad_of(w), torch.tensor(wanted, dtype=torch.float64))


def test_recomputation_that_stops_early_leaves_the_state_as_it_was() -> None:
    model, x, seen = nn.Sequential(*small(), nn.Tanh(), nn.Identity()), leaf(5, 3), Executions()
    with amanda.apply(seen.of("linear")):
        for _ in range(2):
            checkpoint(model, x, use_reentrant=False).sum().backward()
        seen.clear()
        model(x)
    assert len(seen.first) == 2
    assert seen.again == []


@VARIANTS
def test_dropout_draws_the_same_numbers_again(reentrant: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 1)), leaf(5, 3)
    noisy = before("linear", lambda w: w * torch.rand(1), [1])
    results = []
    with amanda.apply(noisy):
        for checkpointed in (True, False):
            torch.manual_seed(3)
            out = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
            out.sum().backward()
            results.append(gradients(model, x))
    equal(results[0], results[1])


@VARIANTS
def test_in_place_edits_are_recomputed(reentrant: bool) -> None:
    def function(value: torch.Tensor) -> torch.Tensor:
        return (value * 2).sigmoid_() * 3

    x = leaf(4)
    with amanda.apply(after("sigmoid_", lambda v: v + 1)):
        checkpoint(function, x, use_reentrant=reentrant).square().sum().backward()
        got, x.grad = x.grad, None
        function(x).square().sum().backward()
    equal(got, x.grad)


@VARIANTS
def test_segments_of_a_sequential(reentrant: bool) -> None:
    model, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), leaf(5, 3)
    with amanda.apply(before("linear", double, [1])):
        checkpoint_sequential(model, 2, x, use_reentrant=reentrant).square().sum().backward()
        got = gradients(model, x)
        model(x).square().sum().backward()
    equal(got, gradients(model, x))


@VARIANTS
def test_analysis_runs_once_for_both_runs(reentrant: bool) -> None:
    model, x, names = small(), leaf(5, 3), list[str]()
    with amanda.apply(tool(lambda c: names.append(c.name), "linear")):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert names == ["0/linear", "2/linear"]


@VARIANTS
def test_reference_taken_earlier_is_recomputed_too(reentrant: bool) -> None:
    early: Callable[..., Any] = checkpoint
    x = leaf(3)
    with amanda.apply(before("exp", double)):
        early(lambda v: v.exp().sin(), x, use_reentrant=reentrant).sum().backward()
    e = (x.detach() * 2).exp()
    close(grad_of(x), e.cos() * e)


MODES = ["left", "inner left", "inner added", "before", "disabled forward", "disabled backward"]


@VARIANTS
@pytest.mark.parametrize("mode", [*MODES, "invalidated", "uncached"])
def test_recomputation_is_that_of_the_first_run_or_refused(reentrant: bool, mode: str) -> None:
    def scaling(position: int, by: float) -> amanda.Tool:
        def analyse(context: amanda.OpContext) -> None:
            context.insert_before_op(lambda v: v * by, [position])

        return tool(analyse, "linear")

    model, x = small(), leaf(5, 3)

    def run(forward: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        scale = scaling(1, 2.0)
        if mode == "left":
            with amanda.apply(scale):
                y = forward()
            y.sum().backward()
        elif mode == "inner left":
            with amanda.apply(amanda.Tool()):
                with amanda.apply(scale):
                    y = forward()
                y.sum().backward()
        elif mode == "inner added":
            with amanda.apply(scale):
                y = forward()
                with amanda.apply(scaling(0, 7.0)):
                    y.sum().backward()
        elif mode == "before":
            y = forward()
            with amanda.apply(scale):
                y.sum().backward()
        elif mode == "disabled forward":
            with amanda.apply(scale):
                with amanda.disabled():
                    y = forward()
                y.sum().backward()
        elif mode == "disabled backward":
            with amanda.apply(scale):
                y = forward()
                with amanda.disabled():
                    y.sum().backward()
        elif mode == "invalidated":
            with amanda.apply(scale):
                y = forward()
                scale.invalidate()
                y.sum().backward()
        else:
            with amanda.apply(scale), amanda.cache_disabled():
                forward().sum().backward()
        return gradients(model)

    expected = run(lambda: model(x))
    if mode in ("left", "invalidated"):
        with pytest.raises(UnsupportedError, match="no longer applied"):
            run(lambda: checkpoint(model, x, use_reentrant=reentrant))
    else:
        equal(run(lambda: checkpoint(model, x, use_reentrant=reentrant)), expected)


@VARIANTS
def test_recomputation_of_what_was_only_watched_is_never_refused(reentrant: bool) -> None:
    model, x = small(), leaf(5, 3)
    model(x).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with amanda.apply(tool(lambda context: None)):
        y = checkpoint(model, x, use_reentrant=reentrant)
    y.sum().backward()
    equal(gradients(model), expected)
