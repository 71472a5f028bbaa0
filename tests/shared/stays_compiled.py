"""Tests of compiled callables."""

from __future__ import annotations

import pytest
import torch

from amanda_driver_torch.torch_internals.versions import are_graphs_tried

__all__ = ["STAYS_COMPILED"]

#: Callables stay compiled only under the native interceptor, and not under every release.
STAYS_COMPILED = pytest.mark.skipif(
    not are_graphs_tried(torch.__version__), reason="this PyTorch's compiled callables run eagerly"
)
