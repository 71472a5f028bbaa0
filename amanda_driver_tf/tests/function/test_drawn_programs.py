"""Random programs under random edits, differentiated in every way, against reference programs.

As in `test_programs`, but that the programs are drawn, too. More of them: AMANDA_TEST_ROUNDS.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit

from .differentiation import IN_SESSIONS, TWICE, WAYS, Unchanged, check
from .random_programs import Drawn
from .reference_programs import Ops, values
from .test_programs import KINDS, some_edits

PROGRAMS = 6 * int(os.environ.get("AMANDA_TEST_ROUNDS", "1"))
VALUES = [value * 0.5 for value in values((3, 3), (3, 3), (3, 3))]

#: At gradients, where loops and branches have zeros and Python's, in the reference, have none.
AT_GRADIENTS = [
    lambda t: t * 0.5,
    tf.sin,
    lambda t: tf.where(t > 0, t, 0.1 * t),
    amanda.staged(lambda t: t * 0.3),
]
#: What TensorFlow does not differentiate that way.
WITHOUT = dict.fromkeys(TWICE, ("recomputed", "gradient", "map"))
#: Expected refusals: one tensor that is several gradients, or a second derivative.
REFUSED = "it is not known which|differentiated once more|cannot follow"


def drawn_edits(some: random.Random, program: Drawn, way: str) -> list[Edit]:
    # Gradients that are differentiated again have no aligned view of their own.
    is_twice = way in TWICE or "gradient" in program.kinds
    kinds = ["before", "after"] if is_twice else [*KINDS, "replace", "backward"]
    return [
        edit._replace(routine=some.choice(AT_GRADIENTS)) if edit.kind.startswith("grad") else edit
        for edit in some_edits(some, program.names, kinds)
    ]


def _fails_plainly(program: Drawn, way: str) -> bool:
    """Return True if TensorFlow fails without any tool, in one of its known ways.

    Its optimizer loses values of branches, gradients of branches use tensors of another branch, and
    a recomputed block is not transposed.
    """
    try:
        {**WAYS, **IN_SESSIONS, **TWICE}[way](program, Ops(), VALUES, True)
    except tf.errors.InvalidArgumentError as error:
        return "Retval" in str(error)
    except AssertionError as error:
        return traceback.extract_tb(error.__traceback__)[-1].name == "_resolve_grad_inputs"
    except NotImplementedError as error:
        return "recompute_grad" in str(error)
    return False


def _drawn(way: str) -> Iterator[tuple[Drawn, random.Random]]:
    """Return the requested number of programs, without those that TensorFlow cannot run."""
    wanted = PROGRAMS
    for seed in range(2 * PROGRAMS):
        some = random.Random(f"{seed} {way}")
        depth = 1 if way in TWICE else some.choice([1, 2])
        program = Drawn(f"{seed} {way}", some.choice([3, 5]), depth, WITHOUT.get(way, ()))
        if _fails_plainly(program, way):
            continue
        yield program, some
        wanted -= 1
        if wanted == 0:
            return
    raise AssertionError("TensorFlow fails on every second program")


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        next(iter(WAYS)),
        *(pytest.param(w, marks=pytest.mark.exhaustive) for w in [*WAYS, *IN_SESSIONS, *TWICE][1:]),
    ],
)
def test_drawn_programs(way: str) -> None:
    different = 0
    for program, some in _drawn(way):
        for _ in range(2):
            edits = drawn_edits(some, program, way)
            try:
                check(program, VALUES, edits, way)
                different += 1
            except Unchanged:
                pass
            except UnsupportedError as error:
                if not any(reason in str(error) for reason in REFUSED.split("|")):
                    raise
            except Exception as error:
                raise AssertionError(f"{edits} in\n{program}") from error
    assert different >= PROGRAMS // 2, "hardly an edit changed anything: a test of little"


def test_drawn_programs_have_all_kinds_of_lines() -> None:
    kinds: set[Any] = set()
    for seed in range(60):
        kinds |= Drawn(seed).kinds
    assert kinds >= {"loop", "branch", "switch", "call", "map", "recomputed", "custom gradient"}
    assert str(Drawn(3)) == str(Drawn(3))
    assert str(Drawn(3)) != str(Drawn(4))
