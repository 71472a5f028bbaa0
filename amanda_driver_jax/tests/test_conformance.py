"""Amanda's conformance suite over this driver."""

from __future__ import annotations

import pytest

from amanda_core.testing import Backend, conformance
from amanda_core.testing.kit.fixtures import rig_of
from amanda_core.testing.suite.test_interrupted import PARTS, check, check_first_lines

from .jax_backends import Eager, Jit

TestEager = conformance(Eager)
TestJit = conformance(Jit)


#: Each of 8,000 lines where a file runs it first takes a quarter of a second, since JAX traces and
#: lowers the program again in 60,000 lines of Python. A part takes up to five minutes.
FIRST = 16
EVERY = 128


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", [Eager, Jit])
@pytest.mark.parametrize("part", range(FIRST))
def test_an_exception_where_each_line_of_a_file_runs_first(
    backend: type[Backend], part: int, request: pytest.FixtureRequest
) -> None:
    for rig in rig_of(backend(), request):
        check_first_lines(rig, part, FIRST)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", [Eager, Jit])
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_an_exception_at_an_eighth_of_all_lines(
    backend: type[Backend], part: int, request: pytest.FixtureRequest
) -> None:
    for rig in rig_of(backend(), request):
        check(rig, part, EVERY)
