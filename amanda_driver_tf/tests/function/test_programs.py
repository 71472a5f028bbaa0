"""Programs under random edits, differentiated in every way, against reference programs.

These have the edits built in, and run eagerly without tools, with `tf.custom_gradient` in place of
the driver's work.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, editing

from ..comparison import close
from .differentiation import TWICE, WAYS, Unchanged, check
from .programs import OPS, PROGRAMS
from .reference_programs import Ops, as_written, values

#: How many random sets of edits each program gets; more find more, in more time.
ROUNDS = int(os.environ.get("AMANDA_TEST_ROUNDS", "1"))

X, W, V = values((2, 3), (3, 3), (3, 3))

ROUTINES: list[Callable[..., Any]] = [
    lambda t: t * 0.5 + 0.3,
    tf.sin,
    lambda t: tf.where(t > 0, t, 0.1 * t),
]
#: Number of inputs -> replacement of an op, and of its backward.
REPLACEMENTS: dict[int, Callable[..., Any]] = {
    1: lambda a: tf.cos(a) * a,
    2: lambda a, b: tf.sin(a) * b + a,
}
BACKWARD: dict[int, Callable[..., Any]] = {
    1: lambda g: tf.sin(g) * 2,
    2: lambda g: (tf.sin(g) * 2, g * 3),
}


def one_edit(some: random.Random, name: str, kind: str) -> Edit:
    inputs = OPS[name[0]]
    position = some.randrange(inputs)
    routine = some.choice(ROUTINES)
    if kind == "replace":
        routine = REPLACEMENTS[inputs]
    if kind == "backward":
        routine = BACKWARD[inputs]
    if some.random() < 0.3:
        routine = amanda.staged(lambda *values, inner=routine: inner(*values))
    kind, _, differentiated = kind.partition(" ")
    if kind in ("replace", "backward"):
        return Edit(name, kind, routine)
    return Edit(
        name, kind, routine, position if kind in ("before", "grad_in") else 0, bool(differentiated)
    )


KINDS = ["before", "after", "grad_out", "grad_in", "before autodiff", "after autodiff"]
# Replacements take the shape of their inputs and give it back.
ELEMENTWISE = "tgeipqadfnx"


def some_edits(some: random.Random, names: list[str], kinds: list[str]) -> list[Edit]:
    edits: list[Edit] = []
    for _ in range(some.choice([1, 1, 2, 3])):
        name, kind = some.choice(names), some.choice(kinds)
        if kind in ("replace", "backward"):
            taken = any(e.name == name and e.kind == kind for e in edits)
            # Those of the other kind would be of another shape where inputs are broadcast.
            if taken or name[0] not in ELEMENTWISE:
                continue
        edits.append(one_edit(some, name, kind))
    return edits


def run(program: Any, edits: list[Edit], way: str) -> None:
    # A random edit may be of what the way of differentiation does not look at.
    with contextlib.suppress(Unchanged):
        check(program, [X, W, V], edits, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", list(PROGRAMS), ids=lambda program: program.__name__)
def test_random_edits(program: Any, way: str) -> None:
    some = random.Random(f"{program.__name__} {way}")
    kinds = [*KINDS]
    if program.__name__ != "passed_through":
        kinds += ["replace", "backward"]
    for _ in range(ROUNDS):
        run(program, some_edits(some, PROGRAMS[program].split(), kinds), way)


@pytest.mark.slow
@pytest.mark.parametrize("way", TWICE)
@pytest.mark.parametrize("program", list(PROGRAMS), ids=lambda program: program.__name__)
def test_second_derivatives_under_random_edits(program: Any, way: str) -> None:
    some = random.Random(f"{program.__name__} {way}")
    for _ in range((ROUNDS + 1) // 2):
        try:
            run(program, some_edits(some, PROGRAMS[program].split(), ["before", "after"]), way)
        except UnsupportedError as error:
            # One tensor at two positions of an op, edited at one of them.
            if "differentiated once more" not in str(error):
                raise


@pytest.mark.slow
@pytest.mark.parametrize("program", list(PROGRAMS), ids=lambda program: program.__name__)
def test_every_input_edited_of_every_op(program: Any) -> None:
    names = PROGRAMS[program].split()
    edits = [
        Edit(name, "before", lambda t: t * 0.9 + 0.1, position)
        for name in names
        for position in range(OPS[name[0]])
    ]
    run(program, edits, "outside")


@pytest.mark.slow
@pytest.mark.parametrize("program", list(PROGRAMS), ids=lambda program: program.__name__)
def test_edits_that_give_back_what_they_got_change_nothing(program: Any) -> None:
    edits = [
        Edit(name, kind, lambda t: t, 0)
        for name in PROGRAMS[program].split()
        for kind in ("before", "after", "grad_out", "grad_in")
    ]
    tensors = [X, W, V]
    function = tf.function(lambda *v: WAYS["inside"](program, Ops(), v, False), autograph=False)
    with as_written():
        wanted = function(*tensors)
        with amanda.apply(editing(*edits)):
            found = function(*tensors)
    # Under load TensorFlow's threads split sums in other places, plain runs' too: the last bit.
    close(found, wanted)
