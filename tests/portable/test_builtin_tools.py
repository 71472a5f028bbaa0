"""Built-in tools over PyTorch and TensorFlow's modes: the same weights, the same trace."""

from __future__ import annotations

import functools

import pytest

import amanda
from amanda_tools.prune import Prune, numpy_mask
from amanda_tools.trace import Trace

from .models import DENSE, STEPS, WEIGHTS, Effect, Record, assert_same, assert_same_bits, run
from .test_portable_tools import PRODUCTS, PROGRAMS, backends, built_mostly_before, instrumented

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
