"""Imports MXNet, whose import makes NumPy warn, before warnings are errors."""

from __future__ import annotations

import os
import warnings

# What makes MXNet's own gradients right, before it is imported.
os.environ.setdefault("MXNET_MKLDNN_ENABLED", "0")
os.environ.setdefault("MXNET_STORAGE_FALLBACK_LOG_VERBOSE", "0")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mxnet  # noqa: F401
