"""Every differentiable operator under random edits, differentiated in every way.

Compared with reference programs. More edits: AMANDA_TEST_ROUNDS.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import random
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, Routine

from .differentiation import EAGER, TWICE, WAYS, Unchanged, check
from .reference_programs import Ops, is_differentiable
from .samples import LEFT_OUT, SAMPLES, Sample

ROUNDS = int(os.environ.get("AMANDA_TEST_ROUNDS", "1"))
NAME = "tested"

#: What `total` runs, which eager execution does not tell by name from the operator of the sample.
OF_TOTAL = ("Add", "AddV2", "Cast", "Cos", "Imag", "Mul", "Range", "Real", "Reshape", "Sum")
#: Gradients that are slices, which `test_gradients` edits.
OF_SLICES = ("Gather", "GatherV2", "RaggedGather")

#: What graphs may refuse. Slices are not derived again; one tensor may be the gradient of several
#: inputs, edited one by one; of what TensorFlow has no gradient for, only eager tapes ask a tool.
REFUSED = (
    "tf.IndexedSlices",
    "One tensor is the gradient of several inputs",
    "propagates no gradient through",
    "but TensorFlow propagates none to it",
)

#: How many outputs TensorFlow writes, where it leaves the others as the memory was.
WRITTEN = {"FusedBatchNorm": 3, "FusedBatchNormV2": 3, "FusedBatchNormV3": 3}

#: Drawings until one is compared: some change nothing, some are refused.
TRIES = 30


class Program:
    """A sample's operator on its differentiable inputs, and a sum of all that it returns."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        inputs = tf.nest.map_structure(tf.convert_to_tensor, list(sample.inputs))
        self.places = [i for i, each in enumerate(inputs) if is_differentiable(each)]
        self._inputs = [inputs[place] for place in self.places]
        self.values = tf.nest.flatten(self._inputs)
        made = self.operator(*inputs)
        self.outputs = list(made) if isinstance(made, tuple) else [made]
        self.written = WRITTEN.get(sample.op_type, len(self.outputs))

    def operator(self, *inputs: Any) -> Any:
        """Return the operator's output, or a tuple of several."""
        made = tf.nest.flatten(self.sample.run(*inputs, name=NAME))
        return made[0] if len(made) == 1 else tuple(made)

    def __call__(self, o: Ops, *values: Any) -> Any:
        inputs = list(self.sample.inputs)
        given = tf.nest.pack_sequence_as(self._inputs, values)
        for place, value in zip(self.places, given, strict=True):
            inputs[place] = value
        made = o.run(self.operator, (self.sample.op_type, NAME), *inputs)
        # Gradients of the values arrive in another way, too.
        outputs = made if isinstance(made, tuple) else [made]
        return total([list(outputs[: self.written]), list(values)])

    def edits(self, some: random.Random, name: str, kinds: list[str]) -> list[Edit]:
        """Return some edits at random places."""
        found = []
        written = self.outputs[: self.written]
        behind = [i for i, each in enumerate(written) if is_differentiable(each)]
        for kind in some.sample(kinds, some.randint(1, min(3, len(kinds)))):
            autodiff = kind in ("before", "after") and some.random() < 0.4
            routine: Routine = lessened
            position = None
            if kind in ("before", "grad_in"):
                position = some.choice(self.places)
            elif kind in ("after", "grad_out"):
                position = some.choice(behind)
            else:
                routine = self._on_less if kind == "replace" else self._guessed
            found.append(Edit(name, kind, routine, position, autodiff))
        return found

    def _on_less(self, *inputs: Any) -> Any:
        return self.operator(*(lessened(x) if is_differentiable(x) else x for x in inputs))

    def _guessed(self, *gradients: Any) -> Any:
        """Return some gradient of each input, made of the gradients of outputs."""
        # Where none arrives, the reference is given zeros.
        there = zip(gradients, self.outputs, strict=True)
        whole = total([tf.zeros_like(y) if grad is None else grad for grad, y in there])
        found: list[Any] = [None] * len(self.sample.inputs)
        for place, value in zip(self.places, self._inputs, strict=True):
            found[place] = tf.nest.map_structure(
                lambda x: tf.cast(whole, x.dtype) * tf.ones(x.shape, x.dtype), value
            )
        return found


def lessened(value: Any) -> Any:
    """Return values close to the original ones, with the same properties; 0 stays 0."""
    return tf.nest.map_structure(lambda x: x * tf.cast(0.9, x.dtype), value)


def is_expected(error: UnsupportedError, way: str) -> bool:
    """Return True if a refusal is expected."""
    return way not in EAGER and any(reason in str(error) for reason in REFUSED)


def total(outputs: Any) -> Any:
    """Sum all elements of all outputs, with a different weight for each."""
    parts: list[Any] = []
    for output in tf.nest.flatten(outputs):
        if not is_differentiable(output):
            continue
        is_real = output.dtype.is_floating
        for part in [output] if is_real else [tf.math.real(output), tf.math.imag(output)]:
            weights = tf.cos(tf.cast(tf.range(tf.size(part)) + len(parts), part.dtype))
            product = part * tf.reshape(weights, tf.shape(part))
            parts.append(tf.cast(tf.reduce_sum(product), tf.float64))
    return sum(parts[1:], parts[0])


def is_compared(program: Program, some: random.Random, way: str) -> bool:
    """Draw edits and compare them with the reference; return False if they are refused or change
    nothing.
    """
    op_type = program.sample.op_type
    kinds = ["before", "after", "replace", "grad_out", "grad_in", "backward"]
    if op_type in OF_SLICES:
        kinds.remove("grad_in")
    if not all(map(is_differentiable, program.outputs)):
        kinds.remove("backward")
    edits = program.edits(some, op_type if way in EAGER else NAME, kinds)
    try:
        check(program, program.values, edits, way)
    except Unchanged:
        return False
    except Exception as error:
        if isinstance(error, UnsupportedError) and is_expected(error, way):
            return False
        raise AssertionError(f"{way}: {edits}") from error
    return True


def marks_of(number: int) -> list[pytest.MarkDecorator]:
    """Return the tier of a sample: every 32nd is fast, every eighth slow."""
    if number % 8:
        return [pytest.mark.exhaustive]
    return [pytest.mark.slow] if number % 32 else []


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=sample.op_type, marks=marks_of(number))
        for number, sample in enumerate(SAMPLES)
    ],
)
def test_edits(number: int) -> None:
    program = Program(SAMPLES[number])
    ways = [*WAYS, "session"]
    if program.sample.op_type not in OF_TOTAL:
        ways += EAGER
    for turn in range(ROUNDS):
        some = random.Random(f"{number} {turn}")
        for way in ways if ROUNDS > 1 else [ways[number % len(ways)]]:
            assert any(is_compared(program, some, way) for _ in range(TRIES)), way


#: Those whose gradients' gradients are formulas of their own.
TWICE_TYPES = ("BiasAdd", "Conv2D", "Einsum", "FusedBatchNormV3", "MaxPool", "MatMul", "Selu")


@pytest.mark.slow
@pytest.mark.parametrize("way", TWICE)
@pytest.mark.parametrize("op_type", TWICE_TYPES)
def test_edits_under_second_derivatives(op_type: str, way: str) -> None:
    *_, sample = (sample for sample in SAMPLES if sample.op_type == op_type)
    program = Program(sample)
    edits = [Edit(NAME, "before", lessened, place) for place in program.places]
    compared = 0
    for edit in [*edits, Edit(NAME, "after", lessened, 0)]:
        with contextlib.suppress(Unchanged):
            check(program, program.values, [edit], way)
            compared += 1
    assert compared


@pytest.mark.skipif(not tf.__version__.startswith("2.21."), reason="of other releases' operators")
def test_no_operator_is_forgotten() -> None:
    registered = ops.gradient_registry._registry
    differentiable = {
        name
        for name, entry in registered.items()
        # Custom gradients are registered, too.
        if entry["type"] is not None and not name.startswith("CustomGradient-")
    }
    sampled = {sample.op_type for sample in SAMPLES}
    left_out = {
        name
        for name in differentiable - sampled
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_OUT)
    }
    assert differentiable - sampled == left_out
    unused = [p for p in LEFT_OUT if not fnmatch.filter(differentiable - sampled, p)]
    assert not unused
