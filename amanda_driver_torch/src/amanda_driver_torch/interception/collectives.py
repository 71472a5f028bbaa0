"""Collectives of `torch.distributed`, which write tensors without counting it.

Owns the replacements of what all of them call in the end: the methods of process groups, and the
wait for one that was started.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from amanda_core.driver_kit import forget_all_edited, made_once, part, replacing
from amanda_driver_torch.execution.collectives import Collective, finish, is_pending
from amanda_driver_torch.interception.buckets import BUCKETS, delaying
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.distributed import (
    BROADCAST,
    COMMUNICATORS,
    DELAYED,
    Communicator,
)

__all__ = ["forgetting", "found"]


def found() -> Iterator[tuple[Any, str, Any]]:
    """Yield what to replace so that collectives are watched: owner, name and replacement."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import ProcessGroup, Work

    for name, communicator in COMMUNICATORS.items():
        if name in vars(ProcessGroup):
            original = getattr(ProcessGroup, name)
            yield ProcessGroup, name, _starting(original, communicator)
    reducer: Any = getattr(torch.distributed, "Reducer", None)
    if hasattr(reducer, "prepare_for_backward"):
        yield reducer, "prepare_for_backward", _preparing(reducer.prepare_for_backward)
    if hasattr(reducer, DELAYED):
        yield reducer, DELAYED, delaying(getattr(reducer, DELAYED))
    module: Any = torch.distributed
    if hasattr(module, BROADCAST):
        yield module, BROADCAST, _starting(getattr(module, BROADCAST), COMMUNICATORS["broadcast"])
    yield module, "destroy_process_group", _parting(module.destroy_process_group)
    for name in ("wait", "synchronize"):
        yield Work, name, _waiting(getattr(Work, name))


@made_once
def _starting(original: Callable[..., Any], communicator: Communicator) -> Callable[..., Any]:
    collective = Collective(original, communicator)

    @functools.wraps(original)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = STATE.attachment
        try:
            # Also inside of operators that are otherwise opaque, and in backward passes.
            if attachment is None or STATE.quiet or not attachment.session.enabled:
                return original(group, *args, **kwargs)
            hooked = BUCKETS.of_hook(sys._getframe(1)) if STATE.backward else None
            if hooked is None or not collective.is_bound(args):
                return attachment.execute_collective(collective, original, group, args, kwargs)
            reducing, bucket = hooked
            run = functools.partial(original, **kwargs)
            work = attachment.execute_bucket(collective, run, group, args, bucket)
            if is_pending(work):
                reducing.await_end(work)
            return work
        finally:
            forget_all_edited()

    return call


@replacing
def _preparing(original: Callable[..., Any], reducer: Any, *args: Any, **kwargs: Any) -> Any:
    if (attachment := STATE.attachment) is not None:
        attachment.expect_reduction(reducer)
    return original(reducer, *args, **kwargs)


@replacing
def _parting(original: Callable[..., Any], group: Any = None) -> Any:
    if group in (None, torch.distributed.group.WORLD):
        part()
    return original(group)


@replacing
def _waiting(original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
    begin = perf_counter()
    result = forgetting(original)(work, *args, **kwargs)
    finish(work, perf_counter() - begin)
    return result


@replacing
def forgetting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function that writes tensors and leaves their versions as they are."""
    try:
        return original(*args, **kwargs)
    finally:
        forget_all_edited()
