"""Amanda's conformance suite over the modes of this driver."""

from __future__ import annotations

import pytest

from amanda_core.testing import Backend, conformance
from amanda_core.testing.kit.fixtures import rig_of
from amanda_core.testing.suite.test_interrupted import PARTS, check

from .mxnet_backends import Eager, Hybrid, Numpy, StaticHybrid

#: MXNet frees an array in `__del__` by a handle that its constructor sets: an exception inside the
#: constructor, after which nobody holds the array, makes Python print an error of `__del__`.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*NDArrayBase\.__del__:pytest.PytestUnraisableExceptionWarning"
)

TestEager = conformance(Eager)
TestNumpy = conformance(Numpy)
TestHybrid = conformance(Hybrid)
TestStaticHybrid = conformance(StaticHybrid)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", [Eager, Hybrid])
@pytest.mark.parametrize("part", range(PARTS + 1))
def test_an_exception_at_each_line(
    backend: type[Backend], part: int, request: pytest.FixtureRequest
) -> None:
    for rig in rig_of(backend(), request):
        check(rig, part)
