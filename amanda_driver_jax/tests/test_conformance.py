"""Amanda's conformance suite over this driver."""

from __future__ import annotations

import pytest

from amanda_core.testing import Backend, conformance
from amanda_core.testing.kit.fixtures import rig_of
from amanda_core.testing.suite.test_interrupted import PARTS, check

from .jax_backends import Eager, Jit

TestEager = conformance(Eager)
TestJit = conformance(Jit)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", [Eager, Jit])
@pytest.mark.parametrize("part", range(PARTS + 1))
def test_an_exception_at_each_line(
    backend: type[Backend], part: int, request: pytest.FixtureRequest
) -> None:
    for rig in rig_of(backend(), request):
        check(rig, part)
