"""Quiet logs and one thread for whatever framework a test of this folder brings in."""

from __future__ import annotations

import os

# Before the first import of TensorFlow, which reads it only then.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
