"""What holds for all tests that need several distributions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """How many threads there are decides how sums round, and the seed what is drawn."""
    import torch  # Not before the tests of TensorFlow have set its environment.

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
