"""The suite over PyTorch, through each of the driver's interceptors that is there."""

from __future__ import annotations

import pytest

from amanda_core.testing import conformance

from .torch_backend import FunctionModeBackend, NativeBackend, unavailable

pytestmark = pytest.mark.one_interceptor

TestFunctionMode = conformance(FunctionModeBackend)

WHY_NOT_NATIVE = unavailable(NativeBackend)
if not WHY_NOT_NATIVE:
    TestNative = conformance(NativeBackend)


@pytest.mark.skipif(bool(WHY_NOT_NATIVE), reason=WHY_NOT_NATIVE)
def test_the_native_interceptor_is_there() -> None:
    assert NativeBackend().interceptor == "native"
