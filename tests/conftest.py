"""Set-up of the tests that need several distributions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fix the number of threads, on which rounding of sums depends, and the seed."""
    try:
        import torch  # Not before the tests of TensorFlow have set its environment.
    except ModuleNotFoundError:  # Environments of `nox -s matrix` have one framework.
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
