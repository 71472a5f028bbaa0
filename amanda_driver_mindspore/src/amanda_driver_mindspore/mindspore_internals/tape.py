"""MindSpore's tape: whether it records, gates on it, and waiting for what it computes.

Backward programs run in the thread that starts them, and exceptions pass through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _no_grad, _pynative_executor

__all__ = [
    "gated",
    "is_recording",
    "needs_gradient",
    "stop_recording",
    "unrecorded",
    "wait",
]

#: A context manager in which the tape does not record.
unrecorded = _no_grad


def is_recording() -> bool:
    """Return True while the tape of the calling thread records operators."""
    return bool(_pynative_executor.requires_grad())


def needs_gradient(value: Any) -> bool:
    """Return True for a floating-point tensor that the tape derives from one with a gradient."""
    return (
        isinstance(value, Tensor)
        and bool(value._requires_grad)
        and str(value.dtype).startswith(("Float", "BFloat", "Complex"))
    )


def stop_recording() -> None:
    """Forget what was recorded.

    MindSpore does not when an exception ends a program that it records; then it computes wrong
    gradients afterwards, or fails.
    """
    _pynative_executor.clear_res()


def wait() -> None:
    """Wait for the operators that were called; raise the error of one that failed."""
    _pynative_executor.sync()


class _Gate(_Function):  # type: ignore[misc]
    """Passes on new tensors; in the backward program, a function gets their gradients."""

    @staticmethod
    def forward(ctx: Any, backward: Any, new: Sequence[Tensor], *old: Tensor) -> Any:
        ctx.run = backward
        return tuple(new) if len(new) > 1 else new[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (None, None, *ctx.run(list(gradients)))


def gated(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    backward: Callable[[list[Any]], Sequence[Any]],
) -> list[Tensor]:
    """Return `new` as results of `old` on the tape.

    Args:
        old: Tensors on the tape.
        new: Tensors, which may be the same.
        backward: Returns the gradients of `old` for those of the results.
    """
    with _no_grad():
        # Views, because a gate must not return what it was given. `Tensor(parameter)` would be the
        # parameter itself in C++, and MindSpore would not find its place on the tape again.
        views = [value.view_as(value) for value in new]
    result = _Gate.apply(backward, views, *old)
    return list(result) if isinstance(result, tuple) else [result]
