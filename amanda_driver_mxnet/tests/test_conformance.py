"""Amanda's conformance suite over the modes of this driver."""

from __future__ import annotations

from amanda_core.testing import conformance

from .mxnet_backends import Eager, Hybrid, Numpy, StaticHybrid

TestEager = conformance(Eager)
TestNumpy = conformance(Numpy)
TestHybrid = conformance(Hybrid)
TestStaticHybrid = conformance(StaticHybrid)
