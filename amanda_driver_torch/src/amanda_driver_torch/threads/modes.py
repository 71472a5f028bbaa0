"""Modes of torch around the driver's own work: gradients, function modes, dispatch modes.

Owns how the driver's own work runs without the user's function modes, routines and original
operators in them, and what hides work from dispatch modes and the profiler. These are functions
because an exception may arrive at any line, also in the `__exit__` of a context manager before it
has restored anything. So each sets what it restores, and does so again if it was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from amanda_core.driver_kit import OpContext, Plan, Step
from amanda_core.interface import IPoint
from amanda_driver_torch.threads.recordings import ACTIVE, current
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.internals import (
    DisableTorchDispatch,
    DisableTorchFunction,
    dispatch_mode_count,
    function_mode_at,
    function_mode_count,
    is_grad_enabled,
    pop_function_mode,
    pop_saved_tensor_hooks,
    profiler_enabled,
    push_function_mode,
    push_saved_tensor_hooks,
    record_functions,
    set_grad_enabled,
    top_saved_tensor_hooks,
)
from amanda_driver_torch.torch_internals.tensor_attributes import PLAIN

T = TypeVar("T")
R = TypeVar("R")


def call_without_modes(function: Callable[..., R], *args: Any) -> R:
    """Call `function` with the function modes of this thread suspended."""
    before, modes = STATE.suspended, _modes()
    try:
        STATE.suspended = modes
        _set_modes(())
        result = function(*args)
        modes = STATE.suspended  # The original may have entered or left some for good.
        _set_modes(modes)
        STATE.suspended = before
        return result
    except BaseException:
        _set_modes(modes)
        STATE.suspended = before
        raise


def call_in_users_modes(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call `function` with suspended function modes resumed, as in the user's program."""
    modes = STATE.suspended
    if not modes:
        return function(*args, **kwargs)
    try:
        STATE.suspended = []
        _set_modes(modes)
        result = function(*args, **kwargs)
        modes = _modes()
        _set_modes(())
        STATE.suspended = modes
        return result
    except BaseException:
        _set_modes(())
        STATE.suspended = modes
        raise


def is_observed() -> bool:
    """Return True if dispatch modes or the profiler are active in this thread."""
    return profiler_enabled() or bool(dispatch_mode_count())


def call_hidden(values: Iterable[Any], function: Callable[..., R], *args: Any) -> R:
    """Call `function`, which is the driver's own work, unseen by dispatch modes and the profiler.

    Args:
        values: The values worked on. Subclasses of tensors need the dispatch, so work on them is
            not hidden.
        function: Does the work.
        args: Its arguments.
    """
    if not is_observed() or any(
        isinstance(value, torch.Tensor) and type(value) not in PLAIN for value in values
    ):
        return function(*args)
    profiled = profiler_enabled()
    try:
        if profiled:
            record_functions(False)
        with DisableTorchDispatch():
            result = function(*args)
        if profiled:
            record_functions(True)
        return result
    except BaseException:
        if profiled:
            record_functions(True)
        raise


def call_with_gradients(enabled: bool, function: Callable[..., R], *args: Any) -> R:
    """Call `function` with the recording of gradients switched on or off."""
    before = is_grad_enabled()
    try:
        _switch_gradients(enabled)
        result = function(*args)
        _switch_gradients(before)
        return result
    except BaseException:
        _switch_gradients(before)
        raise


def call_with_saved_hooks(
    pack: Callable[[Any], Any],
    unpack: Callable[[Any], Any],
    function: Callable[..., R],
    *args: Any,
) -> R:
    """Call `function` with hooks for the tensors that its operators save for backward."""
    try:
        push_saved_tensor_hooks(pack, unpack)
        result = function(*args)
        pop_saved_tensor_hooks()
        return result
    except BaseException:
        top = top_saved_tensor_hooks(True)
        if top is not None and top[0] is pack:
            pop_saved_tensor_hooks()
        raise


def in_users_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it runs with the suspended modes resumed."""
    return partial(call_in_users_modes, function)


def call_routine(function: Callable[[T], R], argument: T, autodiff: bool = False) -> R:
    """Call a tool's routine in the user's modes, and without recording gradients.

    Args:
        function: Calls the routine.
        argument: Its argument.
        autodiff: Whether to keep recording gradients.
    """
    if is_grad_enabled() and not autodiff:
        if STATE.suspended:
            return call_with_gradients(False, partial(call_in_users_modes, function), argument)
        return call_with_gradients(False, function, argument)
    return call_in_users_modes(function, argument) if STATE.suspended else function(argument)


def analysed(context: OpContext, point: IPoint) -> Plan:
    """Return the plan of an operator, after its analysis where values can be computed now."""
    if ACTIVE and current() is not None:
        return context.plan(point)
    return call_routine(context.trigger_callback, point)


def changes_of(step: Step, values: Sequence[Any], done: tuple[Any, ...]) -> list[tuple[int, Any]]:
    """Run a step; return the positions that it changes in `values`, with the new values.

    Args:
        step: The step.
        values: The values.
        done: The result of its routine, if that was called already.
    """
    if done:
        return step.changes(values, done[0])
    recording = current() if ACTIVE else None
    run = step if recording is None else partial(recording.changes, step)
    return call_routine(run, values, step.action.autodiff)


def _modes() -> list[Any]:
    """Return the function modes of this thread, the innermost last."""
    return [function_mode_at(i) for i in range(function_mode_count())]


def _set_modes(modes: Sequence[Any]) -> None:
    """Make `modes` the function modes of this thread, whatever they are now."""
    while function_mode_count():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def _switch_gradients(enabled: bool) -> None:
    if not function_mode_count():
        set_grad_enabled(enabled)
        return
    # Some releases report this call to function modes, too.
    with DisableTorchFunction():
        set_grad_enabled(enabled)
