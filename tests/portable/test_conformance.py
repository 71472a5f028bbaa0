"""The conformance suite over TensorFlow's modes."""

from __future__ import annotations

import pytest

from amanda_core.testing import conformance

from .tensorflow_backends import EagerBackend, FunctionBackend, GraphBackend

# It starts a process that imports TensorFlow.
MARKS = {"test_a_framework_that_is_imported_under_tools_is_instrumented": pytest.mark.slow}

TestEager = conformance(EagerBackend, MARKS)
TestFunction = conformance(FunctionBackend, MARKS)
TestGraph = conformance(GraphBackend, MARKS)
