"""What torch calls with gradients: from the arguments of a hook to those of a function and back.

The functions map a sequence of gradients to another (`Taps`); they may also be given what their
first routines have returned, if the native interceptor has called these already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_driver_torch._meetings import Result
from amanda_driver_torch._modes import unheard
from amanda_driver_torch._windows import Window

__all__ = ["outputs_prehook", "posthook", "tensor_hook", "window_prehook", "with_shapes"]


def tensor_hook(function: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """A hook on a tensor; it also takes what routines have returned that have been called."""

    def hook(grad: Any, done: tuple[Any, ...] = ()) -> Any:
        (new,) = function((grad,), done)
        return None if new is grad else new

    return hook


def window_prehook(
    function: Callable[[Sequence[Any]], Sequence[Any]], window: Window
) -> Callable[[Sequence[Any]], Any]:
    def hook(grads: Sequence[Any]) -> Any:
        if grads[0] is None:
            return None
        part = window.read(grads[0])
        (new,) = function((part,))
        return None if new is part else (window.write(grads[0], new), *grads[1:])

    return hook


def outputs_prehook(
    function: Callable[[Sequence[Any]], Sequence[Any]], numbers: Sequence[int]
) -> Callable[[Sequence[Any]], Any]:
    """A hook on the node that made several outputs, whose numbers are given."""

    def hook(grads: Sequence[Any]) -> Any:
        given = [grads[number] for number in numbers]
        new = function(given)
        if all(after is before for before, after in zip(given, new, strict=True)):
            return None
        changed = list(grads)
        for number, after in zip(numbers, new, strict=True):
            changed[number] = after
        return tuple(changed)

    return hook


def posthook(
    function: Callable[..., Sequence[Any]],
    places: Sequence[Result],
    windows: Sequence[Window | None],
    dtypes: Sequence[torch.dtype],
) -> Callable[..., Any]:
    """A hook on a node, some of whose results are gradients of an op's inputs, of these dtypes.

    It takes the results, the gradients before the node, the shapes of the inputs, and what routines
    have returned that have been called already.
    """

    def hook(
        results: Sequence[Any],
        _: Sequence[Any],
        shapes: Sequence[torch.Size],
        done: tuple[Any, ...] = (),
    ) -> Any:
        with unheard(results):
            grads = [
                place.given(results[place.number], shape, dtype)
                if window is None or results[place.number] is None
                else window.read(results[place.number])
                for place, shape, window, dtype in zip(places, shapes, windows, dtypes, strict=True)
            ]
        new = function(grads, done)
        if all(after is before for before, after in zip(grads, new, strict=True)):
            return None
        changed = list(results)
        with unheard([*results, *new]):
            for place, window, before, after in zip(places, windows, grads, new, strict=True):
                if after is not before:
                    old = results[place.number]
                    changed[place.number] = (
                        place.back(after, old) if window is None else window.write(old, after)
                    )
        return tuple(changed)

    return hook


def with_shapes(hook: Callable[..., Any], shapes: Sequence[torch.Size]) -> Callable[..., Any]:
    """A `posthook` for one execution."""
    return lambda results, grads: hook(results, grads, shapes)
