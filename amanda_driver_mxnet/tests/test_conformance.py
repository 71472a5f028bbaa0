"""Amanda's conformance suite over the modes of this driver."""

from __future__ import annotations

from amanda_core.testing import conformance

from .mxnet_backends import Eager, Numpy

TestEager = conformance(Eager)
TestNumpy = conformance(Numpy)
