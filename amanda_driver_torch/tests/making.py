"""Short ways to make what nearly every test needs: tools of one action on one op type."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


def leaf(*shape: int) -> torch.Tensor:
    """A random leaf that wants a gradient."""
    return torch.randn(*shape).requires_grad_()


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf of the same value, for the plain program that a test compares with."""
    return tensor.detach().clone().requires_grad_()


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient that a tensor has."""
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
    """Check that a program, once warm, neither keeps nor loses references or objects in its runs.

    Args:
        program: Runs 30 times, and then `runs` times.
        own: Objects that the test made.
        shared: Objects of everybody: what other tests left behind may be freed in between, so that
            their references may differ by less than one for each run.
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
