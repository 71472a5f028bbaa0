"""The conformance suite over TensorFlow's modes."""

from __future__ import annotations

import pytest

from amanda_core.testing import Backend, conformance
from amanda_core.testing.kit.fixtures import rig_of
from amanda_core.testing.suite.test_interrupted import PARTS, check

from .tensorflow_backends import EagerBackend, FunctionBackend, GraphBackend

# It starts a process that imports TensorFlow.
MARKS = {"test_a_framework_that_is_imported_under_tools_is_instrumented": pytest.mark.slow}

TestEager = conformance(EagerBackend, MARKS)
TestFunction = conformance(FunctionBackend, MARKS)
TestGraph = conformance(GraphBackend, MARKS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", [EagerBackend, FunctionBackend, GraphBackend])
@pytest.mark.parametrize("part", range(PARTS + 1))
def test_an_exception_at_each_line(
    backend: type[Backend], part: int, request: pytest.FixtureRequest
) -> None:
    for rig in rig_of(backend(), request):
        check(rig, part)
