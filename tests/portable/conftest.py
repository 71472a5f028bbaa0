"""What TensorFlow reads from the environment, and how many threads torch has, in this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before the first import of TensorFlow, which reads it only then.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# oneDNN fuses operators of functions and not those of eager mode; unfused, all round alike.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """How many threads there are decides how sums round."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
