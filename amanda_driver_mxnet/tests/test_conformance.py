"""Amanda's conformance suite over the modes of this driver."""

from __future__ import annotations

import pytest

from amanda_core.testing import Backend, conformance
from amanda_core.testing.kit.fixtures import rig_of
from amanda_core.testing.suite.test_interrupted import check

from .mxnet_backends import Eager, Hybrid, Numpy, StaticHybrid

TestEager = conformance(Eager)
TestNumpy = conformance(Numpy)
TestHybrid = conformance(Hybrid)
TestStaticHybrid = conformance(StaticHybrid)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", [Eager, Hybrid])
def test_an_exception_at_each_line(backend: type[Backend], request: pytest.FixtureRequest) -> None:
    for rig in rig_of(backend(), request):
        check(rig)
