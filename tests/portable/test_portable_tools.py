"""Tools from one source over PyTorch and TensorFlow's modes: the same results everywhere.

Each tool is compared with a reference program of the same framework and mode, with the tool's
effect written by hand, bit for bit if both run the same operators. The reference programs are
compared with each other. TensorFlow's functions and graphs are built before the tools are applied,
or under them.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

import amanda

from .models import (
    STEPS,
    WEIGHTS,
    Effect,
    Program,
    Record,
    assert_same,
    assert_same_bits,
    masks_of,
    run,
)
from .models_tf import (
    EagerProgram,
    FunctionProgram,
    ReferenceSessionProgram,
    SessionProgram,
    StepFunctionProgram,
)
from .models_torch import TorchProgram
from .tools import (
    Count,
    MagnitudePrune,
    OperatorTrace,
    ReplaceActivation,
    ScaleGradient,
    canonical_axes,
    magnitude_mask,
)

PROGRAMS: dict[str, type[Program]] = {
    "pytorch": TorchProgram,
    "tensorflow eager": EagerProgram,
    "tensorflow function": FunctionProgram,
    "tensorflow step function": StepFunctionProgram,
    "tensorflow session": SessionProgram,
    "tensorflow session, reference variables": ReferenceSessionProgram,
}
SPARSITY = 0.6
#: The layers of the network that have a weight go by two words.
PRODUCTS = ("linear", "matmul")


def parametrized(*fast: str) -> pytest.MarkDecorator:
    """Run a test on all backends, those that are not named among the slow tests."""
    return pytest.mark.parametrize(
        "backend",
        [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS],
    )


backends = parametrized("pytorch", "tensorflow eager", "tensorflow function", "tensorflow session")
few_backends = parametrized("pytorch", "tensorflow eager", "tensorflow function")
BUILT = ["built before", "built inside"]
built = pytest.mark.parametrize("inside", [False, True], ids=BUILT)
built_mostly_before = pytest.mark.parametrize(
    "inside", [False, pytest.param(True, marks=pytest.mark.slow)], ids=BUILT
)
staging = pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])


@functools.cache
def reference(backend: str, name: str) -> Record:
    """Run the program with an effect written by hand, without tools."""
    effect = {
        "plain": Effect(),
        "pruned": Effect(masks=masks_of(SPARSITY)),
        "pruned, dense gradients": Effect(masks=masks_of(SPARSITY), mask_gradients=False),
        "scaled gradients": Effect(relu_gradient=0.5),
        "pruned, scaled gradients": Effect(masks=masks_of(SPARSITY), relu_gradient=0.5),
        "swish": Effect(swish=True),
    }[name]
    return run(PROGRAMS[backend](effect))


def instrumented(backend: str, inside: bool, *tools: amanda.Tool) -> Record:
    """Run the plain program under tools."""
    program = PROGRAMS[backend](Effect())
    if not inside:
        program.build()
    with amanda.apply(*tools):
        return run(program, build=inside)


# The references.


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["plain", "pruned", "pruned, dense gradients", "scaled gradients", "swish"],
)
@backends
def test_the_reference_programs_agree(backend: str, name: str) -> None:
    assert_same(reference(backend, name), reference("pytorch", name))
    # And each does the same in every run, which is what lets bits be compared below.
    again = run(PROGRAMS[backend](Effect()))
    assert_same_bits(again, reference(backend, "plain"))


def test_the_effects_are_effects() -> None:
    names = ["plain", "pruned", "pruned, dense gradients", "scaled gradients", "swish"]
    final = [reference("pytorch", name).weights["conv1.weight"] for name in names]
    for number, one in enumerate(final):
        assert not any(np.allclose(one, other, atol=1e-4) for other in final[:number])


# Counting and tracing.


@built
@backends
def test_counting(backend: str, inside: bool) -> None:
    count = Count("conv2d", "relu", "max_pool2d", "cross_entropy", *PRODUCTS)
    record = instrumented(backend, inside, count)
    assert_same_bits(record, reference(backend, "plain"))
    product = "linear" if backend == "pytorch" else "matmul"
    each = {"conv2d": 2, "relu": 3, "max_pool2d": 1, product: 2, "cross_entropy": 1}
    assert count.forward == {word: n * STEPS for word, n in each.items()}
    assert count.backward == count.forward
    # PyTorch has one backward op a convolution, TensorFlow one for the image and one for the
    # filter. Nobody asks for the gradient of the first image. A graph that holds the whole step
    # leaves it out; eagerly it is computed, and the backward function of a function gives the
    # gradients of all arguments.
    raw = {"pytorch": 2, "tensorflow eager": 4, "tensorflow function": 4}.get(backend, 3)
    assert count.raw["conv2d_backward"] == raw * STEPS
    assert count.raw["relu_backward"] == 3 * STEPS
    assert count.raw["max_pool2d_backward"] == STEPS


@built
@backends
def test_tracing(backend: str, inside: bool) -> None:
    trace = OperatorTrace("conv2d", "relu", "max_pool2d", "cross_entropy", *PRODUCTS)
    record = instrumented(backend, inside, trace)
    assert_same_bits(record, reference(backend, "plain"))
    words = ["product" if word in PRODUCTS else word for word, _ in trace.executed]
    once = ["conv2d", "relu", "max_pool2d", "conv2d", "relu"]
    once += ["product", "relu", "product", "cross_entropy"]
    assert words == once * STEPS
    ids = [number for _, number in trace.executed]
    assert len(set(ids)) == len(once)
    assert ids == ids[: len(once)] * STEPS


# Pruning.


@staging
@built_mostly_before
@few_backends
def test_pruning(backend: str, inside: bool, staged: bool) -> None:
    prune = MagnitudePrune(SPARSITY, staged=staged)
    record = instrumented(backend, inside, prune)
    assert_same_bits(record, reference(backend, "pruned"))
    assert_same(record, reference("pytorch", "pruned"))
    masks = masks_of(SPARSITY)
    assert len(prune.masks) == len(masks)
    for mask, expected in zip(prune.masks, masks.values(), strict=True):
        assert np.array_equal(mask, expected)
    # What is pruned has not moved; the rest has.
    for name, expected in masks.items():
        moved = record.weights[name] != WEIGHTS[name]
        assert not moved[expected == 0].any(), name
        assert moved[expected == 1].any(), name


@pytest.mark.slow
@built_mostly_before
@backends
def test_pruning_with_dense_gradients(backend: str, inside: bool) -> None:
    # Inserted code is not differentiated: the gradient goes straight through.
    record = instrumented(backend, inside, MagnitudePrune(SPARSITY, gradients=False))
    assert_same_bits(record, reference(backend, "pruned, dense gradients"))


def test_the_same_masks_in_all_layouts() -> None:
    layouts = {}
    for backend in PROGRAMS:
        prune = MagnitudePrune(SPARSITY)
        instrumented(backend, False, prune)
        layouts[backend] = prune.layouts
        for mask, expected in zip(prune.masks, masks_of(SPARSITY).values(), strict=True):
            assert np.array_equal(mask, expected), backend
    assert layouts.pop("pytorch") == ["OIHW", "OIHW", "OI", "OI"]
    assert set(map(tuple, layouts.values())) == {("HWIO", "HWIO", "IO", "IO")}


@pytest.mark.parametrize(
    ("layout", "other"),
    [("OIHW", "HWIO"), ("OI", "IO"), ("OIDHW", "DHWIO"), ("IMHW", "HWIM")],
)
def test_masks_do_not_depend_on_the_layout_even_where_magnitudes_are_equal(
    layout: str, other: str
) -> None:
    weight = np.random.default_rng(0).integers(-2, 3, range(2, 2 + len(layout))).astype(np.float32)
    order = [layout.index(axis) for axis in other]
    for sparsity in (0.0, 0.3, 0.5, 1.0):
        mask = magnitude_mask(weight, layout, sparsity)
        assert (mask == 0).sum() == int(weight.size * sparsity)
        assert abs(weight[mask == 0]).max(initial=0) <= abs(weight[mask == 1]).min(initial=9)
        transposed = magnitude_mask(weight.transpose(order), other, sparsity)
        assert np.array_equal(transposed, mask.transpose(order))
    assert canonical_axes(layout) == list(range(len(layout)))


def test_masks_of_depthwise_weights() -> None:
    # Keras keeps (h, w, in, multiplier), PyTorch (in * multiplier, 1, h, w).
    weight = np.random.default_rng(0).normal(size=(3, 3, 4, 2)).astype(np.float32)
    mask = magnitude_mask(weight, "HWIM", 0.5)
    grouped = weight.transpose(2, 3, 0, 1).reshape(8, 1, 3, 3)
    expected = magnitude_mask(grouped, "OIHW", 0.5)
    assert np.array_equal(mask.transpose(2, 3, 0, 1).reshape(8, 1, 3, 3), expected)


# Gradients and replacement.


@staging
@built_mostly_before
@backends
def test_scaling_gradients(backend: str, inside: bool, staged: bool) -> None:
    record = instrumented(backend, inside, ScaleGradient("relu", 0.5, staged))
    assert_same_bits(record, reference(backend, "scaled gradients"))
    assert_same(record, reference("pytorch", "scaled gradients"))


@staging
@built_mostly_before
@backends
def test_replacing_an_operator(backend: str, inside: bool, staged: bool) -> None:
    record = instrumented(backend, inside, ReplaceActivation(staged=staged))
    # Graphs are simplified before they run, a routine called by Python is not.
    assert_same(record, reference(backend, "swish"), tolerance=2e-6)
    assert_same(record, reference("pytorch", "swish"))


@pytest.mark.slow
@built_mostly_before
@backends
def test_several_tools(backend: str, inside: bool) -> None:
    count, trace = Count("conv2d"), OperatorTrace("conv2d")
    tools = (count, MagnitudePrune(SPARSITY), ScaleGradient("relu", 0.5), trace)
    record = instrumented(backend, inside, *tools)
    assert_same_bits(record, reference(backend, "pruned, scaled gradients"))
    assert count.forward["conv2d"] == len(trace.executed) == 2 * STEPS


# Nothing is left.


@backends
def test_a_program_is_the_old_one_afterwards(backend: str) -> None:
    program = PROGRAMS[backend](Effect())
    program.build()
    prune = MagnitudePrune(SPARSITY)
    with amanda.apply(prune):
        program.step(0)
    assert len(prune.masks) == 4
    program.step(1)
    program.step(2)
    program.finish()
    # The step under the tool, then dense ones from there.
    pruned, plain = reference(backend, "pruned"), reference(backend, "plain")
    assert program.record.losses[0] == pruned.losses[0]
    assert program.record.losses[1] not in (pruned.losses[1], plain.losses[1])
    for name, gradient in program.record.gradients[1].items():
        assert not name.endswith("weight") or (gradient != 0).mean() > 0.5, name


@backends
def test_the_plain_program_is_untouched(backend: str) -> None:
    instrumented(backend, False, MagnitudePrune(SPARSITY), ScaleGradient("relu", 0.5))
    assert_same_bits(run(PROGRAMS[backend](Effect())), reference(backend, "plain"))
