"""Built-in tools over PyTorch and TensorFlow's modes: the same weights, the same trace."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import amanda
from amanda_tools.faults import InjectFaults
from amanda_tools.prune import Prune, PruneNM, numpy_mask
from amanda_tools.trace import Trace

from .models import DENSE, STEPS, WEIGHTS, Effect, Record, assert_same, assert_same_bits, run
from .test_portable_tools import (
    PRODUCTS,
    PROGRAMS,
    backends,
    built_mostly_before,
    few_backends,
    instrumented,
)
from .tools import Array

SPARSITY = 0.55


@functools.cache
def reference(backend: str, pruned: bool, gradients: bool = True) -> Record:
    """Run the program without tools, with the masks written by hand if requested."""
    if not pruned:
        return run(PROGRAMS[backend](Effect()))
    masks = {
        name: numpy_mask(
            WEIGHTS[name], list(range(WEIGHTS[name].ndim)), round(SPARSITY * WEIGHTS[name].size)
        )
        for name in DENSE
    }
    return run(PROGRAMS[backend](Effect(masks=masks, mask_gradients=gradients)))


@pytest.mark.parametrize("gradients", [True, pytest.param(False, marks=pytest.mark.slow)])
@built_mostly_before
@backends
def test_pruning(backend: str, inside: bool, gradients: bool) -> None:
    tool = Prune(SPARSITY, gradients)
    record = instrumented(backend, inside, tool)
    assert_same_bits(record, reference(backend, True, gradients))
    assert_same(record, reference("pytorch", True, gradients))
    found = tool.result()
    assert [weight.elements for weight in found.weights] == [WEIGHTS[n].size for n in DENSE]
    assert [w.pruned for w in found.weights] == [
        round(SPARSITY * w.elements) for w in found.weights
    ]


def groups_mask(weight: Array, n: int, m: int) -> Array:
    """Return 1 for the `n` largest of each `m` consecutive input channels, and 0 for the others."""
    moved = np.abs(np.moveaxis(weight, 1, -1))
    mask = np.zeros_like(moved)
    for place in np.ndindex(moved.shape[:-1]):
        for start in range(0, moved.shape[-1], m):
            for index in sorted(range(start, start + m), key=lambda i: moved[place][i])[m - n :]:
                mask[(*place, index)] = 1
    return np.moveaxis(mask, -1, 1)


def n_of_m() -> dict[str, Array]:
    chosen = [name for name in DENSE if WEIGHTS[name].shape[1] % 2 == 0]
    return {name: groups_mask(WEIGHTS[name], 1, 2) for name in chosen}


@backends
def test_pruning_of_n_of_m(backend: str) -> None:
    tool, masks = PruneNM(1, 2), n_of_m()
    record = instrumented(backend, False, tool)
    assert_same_bits(record, run(PROGRAMS[backend](Effect(masks=masks))))
    assert [weight.pruned for weight in tool.result().weights] == [
        int((mask == 0).sum()) for mask in masks.values()
    ]


@backends
def test_sr_ste_without_its_decay_keeps_the_gradient_dense(backend: str) -> None:
    # In the first step. Later ones have other masks.
    record = instrumented(backend, False, PruneNM(1, 2, method="sr_ste", decay=0.0))
    by_hand = run(PROGRAMS[backend](Effect(masks=n_of_m(), mask_gradients=False)))
    assert record.losses[0] == by_hand.losses[0]
    assert record.losses[1] != by_hand.losses[0]


@pytest.mark.parametrize("scope", ["global", pytest.param("layer", marks=pytest.mark.slow)])
@few_backends
def test_pruning_of_several_weights_together(backend: str, scope: Any) -> None:
    """The first step is not pruned, so the masks are those of the weights in it."""

    def stepped(backend: str, tool: Prune) -> Record:
        program = PROGRAMS[backend](Effect())
        program.build()
        with amanda.apply(tool):
            for number in range(STEPS):
                program.step(number)
                amanda.step()
            program.finish()
        return program.record

    tool, other = Prune(SPARSITY, scope=scope), Prune(SPARSITY, scope=scope)
    record = stepped(backend, tool)
    assert_same(record, stepped("pytorch", other))
    found = tool.result()
    assert [w.pruned for w in found.weights] == [w.pruned for w in other.result().weights]
    if scope == "global":
        elements = sum(WEIGHTS[name].size for name in DENSE)
        assert sum(w.pruned for w in found.weights) == round(SPARSITY * elements)


@built_mostly_before
@backends
def test_tracing(backend: str, inside: bool) -> None:
    trace = Trace()
    record = instrumented(backend, inside, trace)
    assert_same_bits(record, reference(backend, False))
    found = trace.result()
    words = ("conv2d", "relu", "max_pool2d", "cross_entropy", *PRODUCTS)
    named = [op for op in found.ops if op.word in words]
    assert len(named) == 9
    assert {op.calls for op in named} == {STEPS}
    order = [found.ops[index].word for index in found.sequence if found.ops[index] in named]
    product = "linear" if backend == "pytorch" else "matmul"
    once = ["conv2d", "relu", "max_pool2d", "conv2d", "relu", product, "relu", product]
    assert order == [*once, "cross_entropy"] * STEPS
    assert all("[" in text for op in named for text in op.outputs if text is not None)


def test_both_at_once() -> None:
    tool, trace = Prune(SPARSITY), Trace(limit=5)
    program = PROGRAMS["pytorch"](Effect())
    program.build()
    with amanda.apply(tool, trace):
        record = run(program, build=False)
    assert_same_bits(record, reference("pytorch", True))
    assert len(trace.result().sequence) == 5


@backends
def test_faults_are_the_same_in_every_framework(backend: str) -> None:
    """A gradient is scaled as a whole, and zeros are written into all outputs."""
    tool = InjectFaults(["relu"], site="gradient", model="scale", amount=0.5, rate=1.0)
    record = instrumented(backend, False, tool)
    assert_same(record, run(PROGRAMS[backend](Effect(relu_gradient=0.5))))
    sites = tool.result().sites
    assert len(sites) == 3
    assert all(site.faults == site.elements > 0 for site in sites)
    flips = InjectFaults(["relu"], bits="sign", rate=1.0)
    twice = InjectFaults(["relu"], bits="sign", rate=1.0)
    record = instrumented(backend, False, flips, twice)
    assert_same_bits(record, reference(backend, False))
