"""What TensorFlow reads from the environment, for all tests of this folder."""

from __future__ import annotations

import os

# Before the first import of TensorFlow, which reads it only then.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# oneDNN fuses operators of functions and not those of eager mode; unfused, all round alike.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
