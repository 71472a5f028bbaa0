"""Amanda's conformance suite over the modes of this driver."""

from __future__ import annotations

from amanda_core.testing import conformance

from .mindspore_backends import PyNative

TestPyNative = conformance(PyNative)
