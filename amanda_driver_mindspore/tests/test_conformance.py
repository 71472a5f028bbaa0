"""Amanda's conformance suite over the modes of this driver."""

from __future__ import annotations

from amanda_core.testing import conformance

from .mindspore_backends import GraphMode, Jitted, PyNative

TestPyNative = conformance(PyNative)
TestJitted = conformance(Jitted)
TestGraphMode = conformance(GraphMode)
