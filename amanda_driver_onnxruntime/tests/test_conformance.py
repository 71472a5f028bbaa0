"""Amanda's conformance suite over this driver."""

from __future__ import annotations

from amanda_core.testing import conformance

from .onnxruntime_backends import BasicBackend, OnnxRuntimeBackend

TestOptimized = conformance(OnnxRuntimeBackend)
TestBasic = conformance(BasicBackend)
