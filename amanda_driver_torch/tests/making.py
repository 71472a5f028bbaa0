"""Short ways to make what nearly every test needs: tools of one action on one op type."""

from __future__ import annotations

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
