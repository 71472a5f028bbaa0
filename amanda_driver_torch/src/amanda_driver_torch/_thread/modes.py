"""The modes of torch that this driver sets around what it runs: gradients, and the user's own.

Owns extents: in one the user's function modes are laid aside, so that they hear nothing of the
driver's own work; in another, for routines and original operators, they are back; and in a third
dispatch modes and the profiler hear nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from amanda_core import Step
from amanda_driver_torch._thread.state import STATE
from amanda_driver_torch._torch.internals import (
    DisableTorchDispatch,
    DisableTorchFunction,
    dispatch_mode_count,
    function_mode_count,
    pop_function_mode,
    profiler_enabled,
    push_function_mode,
    record_functions,
    set_grad_enabled,
)
from amanda_driver_torch._torch.reading import PLAIN

__all__ = [
    "back",
    "call_routine",
    "changes_of",
    "in_users_modes",
    "laid_aside",
    "overheard",
    "unheard",
]

T = TypeVar("T")
R = TypeVar("R")


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


def overheard() -> bool:
    """Return True if dispatch modes or the profiler are active in this thread."""
    return profiler_enabled() or bool(dispatch_mode_count())


@contextmanager
def unheard(values: Iterable[Any]) -> Iterator[None]:
    """Extent of the driver's own work that neither dispatch modes nor the profiler hear of.

    Args:
        values: What is worked on. Subclasses of tensors need the dispatch, and are heard of.
    """
    profiled = profiler_enabled()
    if not overheard() or any(
        isinstance(value, torch.Tensor) and type(value) not in PLAIN for value in values
    ):
        yield
        return
    if profiled:
        record_functions(False)
    try:
        with DisableTorchDispatch():
            yield
    finally:
        if profiled:
            record_functions(True)


def in_users_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called where the modes laid aside are back."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with back():
            return function(*args, **kwargs)

    return call


def call_routine(function: Callable[[T], R], argument: T, autodiff: bool = False) -> R:
    """Call what ends in a tool's routine: in the user's modes, and without gradients.

    Args:
        function: Calls the routine.
        argument: Its argument.
        autodiff: Whether to leave gradients as they are.
    """
    switch = torch.is_grad_enabled() and not autodiff
    if not (switch or STATE.aside):
        return function(argument)
    if switch:
        _switch_gradients(False)
    try:
        with back():
            return function(argument)
    finally:
        if switch:
            _switch_gradients(True)


def changes_of(step: Step, values: Sequence[Any], done: tuple[Any, ...]) -> list[tuple[int, Any]]:
    """Return what a step changes in `values`; `done` holds what its routine returned, if called."""
    if done:
        return step.changes(values, done[0])
    return call_routine(step, values, step.action.autodiff)


def _pop() -> list[Any]:
    count = function_mode_count()
    return [pop_function_mode() for _ in range(count)]


def _push(modes: list[Any]) -> None:
    for mode in reversed(modes):
        push_function_mode(mode)


def _switch_gradients(enabled: bool) -> None:
    # It is itself reported to function modes (torch 2.13).
    with DisableTorchFunction():
        set_grad_enabled(enabled)
