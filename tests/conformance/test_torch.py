"""The suite over PyTorch, through each of the driver's interceptors that is there."""

from __future__ import annotations

import pytest

from amanda_core.testing import conformance

from .torch_backend import FunctionModeBackend, NativeBackend, TorchBackend, unavailable


def _whole(backend: type[TorchBackend]) -> type:
    """The suite, skipped as a whole where the interceptor is not built."""
    reason = unavailable(backend)
    return pytest.mark.skipif(bool(reason), reason=reason)(conformance(backend))


TestFunctionMode = _whole(FunctionModeBackend)
TestNative = _whole(NativeBackend)
