"""Set-up of the tests that need several distributions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fix the number of threads, on which rounding of sums depends, and the seed."""
    import torch  # Not before the tests of TensorFlow have set its environment.

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
