"""Zones whose beginning and end torch itself marks: steps of optimizers, and data loading.

Owns the way from torch's marks to the attachment of the calling thread, the closures that run the
model inside a step, and the end of a step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amanda_core.driver_kit import Activation, Patches, made_once
from amanda_driver_torch.facts import STEPPED
from amanda_driver_torch.identity.frames import BOUNDARY
from amanda_driver_torch.threads.state import STATE

__all__ = ["found", "hook_steps"]

#: What the names begin with that torch gives to ranges of the profiler -> the zone there.
_RANGES = {
    "Optimizer.step#": "optimizer",
    "Optimizer.zero_grad#": "optimizer",
    "enumerate(Data": "data",  # DataLoader and DataPipe
}
_PREFIXES = tuple(_RANGES)


def found() -> Iterator[tuple[Any, str, Any]]:
    """Yield what to replace to watch the marks: owner, name and replacement."""
    ranges = torch.autograd.profiler.record_function
    yield ranges, "__enter__", _entering(ranges.__enter__)
    yield ranges, "__exit__", _leaving(ranges.__exit__)


def hook_steps(patches: Patches) -> None:
    """Watch the steps of optimizers until the patches are undone."""
    for handle, hook in _STEP_HOOKS:
        patches.afterwards(handle.remove)
        handle.hooks_dict_ref()[handle.id] = hook


@made_once
def _entering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        entered = original(self)
        try:
            if self.name.startswith(_PREFIXES) and (attachment := STATE.attachment) is not None:
                zone = next(compress(_RANGES.values(), map(self.name.startswith, _RANGES)))
                frame = sys._getframe(1)
                leave = attachment.attempt(zone, _nothing, attachment.enter_zone, zone, frame)
                STATE.ranges[id(self)] = leave
            return entered
        except BaseException:
            STATE.ranges.pop(id(self), _nothing)()
            raise

    return __enter__


@made_once
def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __exit__(self: Any, *error: Any) -> Any:
        leave = STATE.ranges.get(id(self))
        if leave is None:
            return original(self, *error)
        try:
            leave()
            STATE.ranges.pop(id(self), None)
            return original(self, *error)
        except BaseException:
            leave()
            STATE.ranges.pop(id(self), None)
            raise

    return __exit__


def _nothing() -> None:
    pass


def _open_closures(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the closures among the arguments of a step: the model that they run is none of it."""
    # First, so that Dynamo, which traces this in a compiled step, sees nothing of the rest.
    if torch.compiler.is_compiling() or STATE.attachment is None:
        return None
    if not any(map(_is_closure, (*args[1:], *kwargs.values()))):
        return None
    outside = list(STATE.activations)
    while outside and outside[-1].scope.zone == "optimizer":
        outside.pop()
    opened = [_opened(one, outside) if _is_closure(one) else one for one in args[1:]]
    named = {name: _opened(v, outside) if _is_closure(v) else v for name, v in kwargs.items()}
    return (args[0], *opened), named


def _is_closure(value: Any) -> bool:
    return callable(value) and not isinstance(value, (torch.Tensor, nn.Module, type))


def _opened(closure: Callable[..., Any], outside: list[Activation]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        inside = STATE.activations
        try:
            STATE.activations = outside
            result = closure(*args, **kwargs)
            STATE.activations = inside
            return result
        except BaseException:
            STATE.activations = inside
            raise

    BOUNDARY[id(run.__code__)] = run.__code__
    return functools.update_wrapper(run, closure)


def _step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
    attachment = STATE.attachment
    if attachment is not None:
        STEPPED.add(optimizer)
        attachment.reductions.passes = 0
        attachment.attempt("the end of a step", None, attachment.session.end_step)


#: Where the hooks of steps are put. `register` takes several lines, and an exception between them
#: would leave a hook.
_STEP_HOOKS: list[tuple[Any, Callable[..., Any]]] = [
    (register_optimizer_step_pre_hook(_open_closures), _open_closures),
    (register_optimizer_step_post_hook(_step_ended), _step_ended),
]
for _handle, _ in _STEP_HOOKS:
    _handle.remove()
