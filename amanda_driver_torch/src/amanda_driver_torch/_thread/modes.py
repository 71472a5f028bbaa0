"""Modes of torch around the driver's own work: gradients, function modes, dispatch modes.

Owns the contexts that suspend the user's function modes during the driver's own work, that resume
them for routines and original operators, and that hide work from dispatch modes and the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from amanda_core import Step
from amanda_driver_torch._thread.state import STATE
from amanda_driver_torch._torch.internals import (
    DisableTorchDispatch,
    DisableTorchFunction,
    dispatch_mode_count,
    function_mode_count,
    is_grad_enabled,
    pop_function_mode,
    profiler_enabled,
    push_function_mode,
    record_functions,
    set_grad_enabled,
)
from amanda_driver_torch._torch.tensor_attributes import PLAIN

__all__ = [
    "call_routine",
    "changes_of",
    "hidden_from_modes",
    "in_users_modes",
    "is_observed",
    "resumed_modes",
    "suspended_modes",
]

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def suspended_modes() -> Iterator[None]:
    """Suspend the function modes of this thread during this context."""
    before, STATE.suspended = STATE.suspended, _pop()
    try:
        yield
    finally:
        _push(STATE.suspended)
        STATE.suspended = before


@contextmanager
def resumed_modes() -> Iterator[None]:
    """Resume suspended function modes during this context, as in the user's program."""
    modes, STATE.suspended = STATE.suspended, []
    _push(modes)
    try:
        yield
    finally:
        STATE.suspended = _pop() if modes else []


def is_observed() -> bool:
    """Return True if dispatch modes or the profiler are active in this thread."""
    return profiler_enabled() or bool(dispatch_mode_count())


_NOTHING = nullcontext()


def hidden_from_modes(values: Iterable[Any]) -> AbstractContextManager[None]:
    """Hide the driver's own work from dispatch modes and the profiler during this context.

    Args:
        values: The values worked on. Subclasses of tensors need the dispatch, so work on them is
            not hidden.
    """
    if not is_observed() or any(
        isinstance(value, torch.Tensor) and type(value) not in PLAIN for value in values
    ):
        return _NOTHING
    return _hidden()


@contextmanager
def _hidden() -> Iterator[None]:
    profiled = profiler_enabled()
    if profiled:
        record_functions(False)
    try:
        with DisableTorchDispatch():
            yield
    finally:
        if profiled:
            record_functions(True)


def in_users_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it runs with the suspended modes resumed."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with resumed_modes():
            return function(*args, **kwargs)

    return call


def call_routine(function: Callable[[T], R], argument: T, autodiff: bool = False) -> R:
    """Call a tool's routine in the user's modes, and without recording gradients.

    Args:
        function: Calls the routine.
        argument: Its argument.
        autodiff: Whether to keep recording gradients.
    """
    switch = is_grad_enabled() and not autodiff
    if not (switch or STATE.suspended):
        return function(argument)
    if switch:
        _switch_gradients(False)
    try:
        if not STATE.suspended:
            return function(argument)
        with resumed_modes():
            return function(argument)
    finally:
        if switch:
            _switch_gradients(True)


def changes_of(step: Step, values: Sequence[Any], done: tuple[Any, ...]) -> list[tuple[int, Any]]:
    """Run a step; return the positions that it changes in `values`, with the new values.

    Args:
        step: The step.
        values: The values.
        done: The result of its routine, if that was called already.
    """
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
    # Some releases report this call to function modes, too.
    with DisableTorchFunction():
        set_grad_enabled(enabled)
