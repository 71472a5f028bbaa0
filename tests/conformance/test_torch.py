"""The suite over PyTorch, through the interceptor that AMANDA_TORCH_INTERCEPTOR names."""

from __future__ import annotations

from amanda_core.testing import conformance

from .torch_backend import TorchBackend

TestTorch = conformance(TorchBackend)
