"""Imports MindSpore, whose import warns, before warnings are errors."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("GLOG_v", "3")  # MindSpore's own log: errors only.

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mindspore  # noqa: F401
