"""Each test starts with the same random numbers and leaves no tool applied.

PyTorch's import takes seconds. Processes that run none of these tests load this module, too; so
fixtures import it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start_and_nothing_left() -> Iterator[None]:
    import torch

    from amanda_driver_torch.threads.state import STATE

    torch.manual_seed(0)
    yield
    depth = torch._C._len_torch_function_stack()
    for _ in range(depth):  # One failure is enough; the next test starts clean.
        torch._C._pop_torch_function_stack()
    assert STATE.attachment is None
    assert not STATE.quiet
    assert not STATE.opaque
    assert not STATE.transparent
    assert not STATE.backward
    assert not STATE.activations
    assert depth == 0
    assert torch._C._is_torch_function_enabled()


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under the native interceptor, with nothing compiled before or left behind."""
    import torch

    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
