"""The conformance suite over TensorFlow's modes."""

from __future__ import annotations

from amanda_core.testing import conformance

from .tensorflow_backends import EagerBackend, FunctionBackend, GraphBackend

TestEager = conformance(EagerBackend)
TestFunction = conformance(FunctionBackend)
TestGraph = conformance(GraphBackend)
