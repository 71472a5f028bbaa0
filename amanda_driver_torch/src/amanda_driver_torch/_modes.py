"""The modes of torch that this driver sets around what it runs: gradients, and the user's own.

Owns two extents: in one the user's function modes are laid aside, so that they hear nothing of the
driver's own work; in the other, for routines and original operators, they are back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amanda_driver_torch._state import STATE

__all__ = ["back", "in_users_modes", "laid_aside", "routine"]


@contextmanager
def laid_aside() -> Iterator[None]:
    """Extent without the function modes of this thread; they are kept in the thread's state."""
    before, STATE.aside = STATE.aside, _pop()
    try:
        yield
    finally:
        _push(STATE.aside)
        STATE.aside = before


@contextmanager
def back() -> Iterator[None]:
    """Extent in which the modes laid aside are in force, as in the user's program."""
    modes, STATE.aside = STATE.aside, []
    _push(modes)
    try:
        yield
    finally:
        STATE.aside = _pop() if modes else []


def in_users_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called where the modes laid aside are back."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with back():
            return function(*args, **kwargs)

    return call


@contextmanager
def routine(autodiff: bool) -> Iterator[None]:
    """Extent of a routine: the user's modes, and gradients only if asked for and on anyway."""
    before = torch.is_grad_enabled()
    wanted = autodiff and before
    if wanted is not before:
        _set_grad_enabled(wanted)
    try:
        if STATE.aside:
            with back():
                yield
        else:
            yield
    finally:
        if wanted is not before:
            _set_grad_enabled(before)


def _pop() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._pop_torch_function_stack() for _ in range(count)]


def _push(modes: list[Any]) -> None:
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)


def _set_grad_enabled(enabled: bool) -> None:
    # It is itself reported to function modes (torch 2.13).
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)
