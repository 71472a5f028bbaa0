"""The suite over PyTorch, through each of the driver's interceptors that is there."""

from __future__ import annotations

import pytest

from amanda_core.testing import conformance

from .torch_backend import FunctionModeBackend, NativeBackend, unavailable

pytestmark = pytest.mark.one_interceptor

# It starts a process that imports torch.
MARKS = {"test_a_framework_that_is_imported_under_tools_is_instrumented": pytest.mark.slow}

TestFunctionMode = conformance(FunctionModeBackend, MARKS)

WHY_NOT_NATIVE = unavailable(NativeBackend)
if not WHY_NOT_NATIVE:
    TestNative = conformance(NativeBackend, MARKS)


@pytest.mark.skipif(bool(WHY_NOT_NATIVE), reason=WHY_NOT_NATIVE)
def test_the_native_interceptor_is_there() -> None:
    assert NativeBackend().interceptor == "native"
