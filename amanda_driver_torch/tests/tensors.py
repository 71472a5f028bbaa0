"""Short ways to make what nearly every test needs: tools of one action on one op type."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def leaf(*shape: int) -> torch.Tensor:
    """Return a random leaf that requires a gradient."""
    return torch.randn(*shape).requires_grad_()


def leaf_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf of the same value, for the plain program to compare with."""
    return tensor.detach().clone().requires_grad_()


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient that a tensor has."""
    assert tensor.grad is not None
    return tensor.grad


def equal(actual: Any, expected: Any) -> None:
    """Compare values, shapes and dtypes of tensors bit by bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def close(actual: Any, expected: Any) -> None:
    """Compare tensors whose sums may have another order."""
    torch.testing.assert_close(actual, expected)


def check_references(
    program: Callable[[], Any], runs: int, own: Sequence[Any], shared: Sequence[Any] = ()
) -> None:
    """Check that a warm program neither leaks nor loses references or objects.

    Args:
        program: Runs 30 times, and then `runs` times.
        own: Objects that the test made.
        shared: Objects used by everybody. Garbage of other tests may be freed in between, so their
            references may differ by less than one per run.
    """
    for _ in range(30):
        program()
    gc.collect()
    before = [sys.getrefcount(thing) for thing in (*own, *shared)]
    objects = len(gc.get_objects())
    for _ in range(runs):
        program()
    gc.collect()
    after = [sys.getrefcount(thing) for thing in (*own, *shared)]
    assert after[: len(own)] == before[: len(own)]
    for thing, old, new in zip(shared, before[len(own) :], after[len(own) :], strict=True):
        assert abs(new - old) < runs, thing
    assert len(gc.get_objects()) - objects < runs / 2


class Net(nn.Module):
    """Two linear layers, and a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.relu(self.a(x)))
