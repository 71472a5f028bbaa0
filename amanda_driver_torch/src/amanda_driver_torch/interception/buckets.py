"""Reductions of gradients by `DistributedDataParallel`, each an operator of one bucket.

Owns the kernel of the operator that the reducer calls in C++, which bucket is reduced, also by a
hook of the program, and the end of each reduction: just before the reducer waits for it. The
program's own reductions run, and no others.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from amanda_core.driver_kit import replacing
from amanda_driver_torch.execution.collectives import Collective, is_pending
from amanda_driver_torch.execution.reductions import Bucket, clear_hooks
from amanda_driver_torch.groups import processes
from amanda_driver_torch.identity.frames import BOUNDARY
from amanda_driver_torch.threads.state import STATE, Watcher
from amanda_driver_torch.torch_internals.distributed import (
    COMMUNICATORS,
    call_at_end,
    hooks_of,
    kernel_of_reductions,
    reducible,
)

__all__ = ["BUCKETS", "delaying"]

#: Modules in whose frames the reducer is called; in other threads it is called by no frame.
_CALLERS = (
    "torch.autograd.graph",
    "torch.nn.parallel.distributed",
    f"{__package__}.patches",
    __name__,
)


#: After how many passes without actions the buckets of a module are not looked at any more. torch
#: makes other buckets before the second pass, or before the third one of a static graph.
_IDLE = 2


class _Pass:
    """The reductions of a module in its next backward pass.

    Attributes:
        reducer: The reducer of the module.
        attachment: That of the thread of the forward pass.
        is_delayed: Whether the reducer waits in the call in which it reduces.
        acts: Whether a tool has acted on one of the reductions.

    Args:
        module: The module.
        attachment: That of the thread.
        idle: In how many passes before no tool has acted, and none was applied since.
    """

    def __init__(self, module: Any, attachment: Watcher, idle: int) -> None:
        self._module: weakref.ref[Any] = weakref.ref(module)
        self._group: str = module.process_group.group_name
        self.reducer, self.attachment = module.reducer, weakref.ref(attachment)
        self._works, self._counts, self.is_delayed = list[Any](), Counter[int | None](), False
        self._times: list[int] = module.reducer.get_backward_stats()
        self._idle, self._epoch, self.acts = idle, attachment.session.epoch, False

    def is_of(self, group: Any) -> bool:
        """Return True if the module reduces over a process group."""
        return bool(self._group == group.group_name)

    def idle(self, attachment: Watcher) -> int:
        """Return in how many passes no tool has acted; 0 if tools have changed since."""
        session = attachment.session
        is_same = self.attachment() is attachment and self._epoch == session.epoch
        # What hooks reduce would be other operators, if their buckets were not known.
        known = session.caching and is_same and not self.acts and not self.hooks()
        return self._idle + bool(self._counts) if known else 0

    def has_advanced(self) -> bool:
        """Return True if further gradients were computed since this was True."""
        before, self._times = self._times, self.reducer.get_backward_stats()
        return before != self._times

    def next_bucket(self, gradients: torch.Tensor) -> Bucket | None:
        """Return what a reducer reduces now, which reduces its buckets in their order."""
        is_map = not (gradients.is_floating_point() or gradients.is_complex())
        number = None if is_map else len(self._counts.keys() - {None})
        return self.bucket(number)

    def bucket(self, number: int | None, hook: str = "") -> Bucket | None:
        """Return the bucket of a number, which is reduced once more."""
        module = self._module()
        occurrence = self._counts[number]
        self._counts[number] += 1
        return None if module is None else Bucket(module, number, occurrence, hook)

    def watching(self) -> Watcher | None:
        """Return the attachment whose tools get what is reduced in this thread."""
        attachment = STATE.attachment or self.attachment()
        if attachment is None or STATE.quiet or attachment.session.closed:
            return None
        return attachment if attachment.session.enabled else None

    def hooks(self) -> list[Any]:
        """Return the program's hooks that reduce in place of the module."""
        module = self._module()
        return [] if module is None else hooks_of(module)

    def await_end(self, work: Any) -> None:
        """Wait for a reduction where the reducer does."""
        self.acts = True
        self._works.append(work)
        if self.is_delayed:
            self._wait()
        elif len(self._works) == 1:
            # The reducer's own callback is queued after its last bucket, so it comes after this.
            call_at_end(self._wait)

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()


class _Buckets:
    """The kernel, while it is there, and the backward passes that are to come."""

    def __init__(self) -> None:
        self._library: Any = None
        self._passes: dict[int, _Pass] = {}

    def begin(
        self,
        module: nn.Module,
        attachment: Watcher,
        afterwards: Callable[[Callable[[], object]], object],
    ) -> None:
        """Note that a module will reduce its gradients.

        Args:
            module: A `DistributedDataParallel` module.
            attachment: That of the thread.
            afterwards: Gets what undoes this.
        """
        before = self._passes.get(id(module))
        idle = 0 if before is None else before.idle(attachment)
        if idle > _IDLE:
            if self._library is not None and all(
                one.idle(attachment) > _IDLE for one in self._passes.values()
            ):
                self._library = None
            return
        self._passes[id(module)] = _Pass(module, attachment, idle)
        if idle == _IDLE and processes() == 1:
            # Where there are others, this is done when the gradients have been reduced.
            clear_hooks(parameter for parameter, _ in reducible(module))
        if self._library is None:
            afterwards(self.end)
            self._library = kernel_of_reductions(self._take)
            if self._library is None:
                why = "in backward passes of DistributedDataParallel: PyTorch tells of none"
                attachment.session.note_call(_collective().op_type, why)

    def end(self) -> None:
        """Remove the kernel: its library does so when nothing refers to it."""
        self._library = None
        self._passes.clear()

    def delay(self, reducer: Any) -> None:
        """Note that a reducer waits in the call in which it reduces, as it does in the first pass
        of a static graph.
        """
        for one in self._passes.values():
            one.is_delayed = one.is_delayed or one.reducer is reducer

    def of_hook(self, frame: FrameType | None) -> tuple[_Pass, Bucket] | None:
        """Return the bucket that a hook of the program reduces in the frames from this one on."""
        kind: Any = torch.distributed.GradBucket  # type: ignore[attr-defined]
        hooked = [one for one in self._passes.values() if one.hooks()]
        while hooked and frame is not None and id(frame.f_code) not in BOUNDARY:
            for value in frame.f_locals.values():
                if isinstance(value, kind):
                    one = self._advanced(hooked)
                    found = one and one.bucket(value.index(), frame.f_code.co_name)
                    return (one, found) if one and found else None
            frame = frame.f_back
        return None

    def _advanced(self, passes: list[_Pass]) -> _Pass | None:
        """Return the pass to which a reduction belongs: of several, the one that goes on."""
        if len(passes) > 1:
            passes = [one for one in passes if one.has_advanced()]
        return passes[0] if len(passes) == 1 else None

    def _take(
        self, reduce: Callable[..., Any], tensors: list[torch.Tensor], group: Any, *others: Any
    ) -> Any:
        """Reduce a bucket, or what else the operator of the dispatcher is called for."""
        returned = list[Any]()

        def start(*_: Any) -> Any:
            returned[:] = reduce(tensors, group, *others)
            return torch.distributed.Work.unbox(returned[1])

        if not _is_reducer(sys._getframe(1).f_back):
            return reduce(tensors, group, *others)
        shared = torch.distributed.ProcessGroup.unbox(group)
        one = self._advanced([one for one in self._passes.values() if one.is_of(shared)])
        bucket = None if one is None else one.next_bucket(tensors[0])
        attachment = STATE.attachment if one is None else one.watching()
        if attachment is None:
            return reduce(tensors, group, *others)
        if one is None or bucket is None:
            why = "in a backward pass, since it is not known which module reduces"
            attachment.session.note_call(_collective().op_type, why)
            return reduce(tensors, group, *others)
        operation = torch.distributed.ReduceOp.RedOpType(others[0].op())
        values = tensors, SimpleNamespace(asyncOp=True, reduceOp=operation)
        work = attachment.execute_bucket(_collective(), start, shared, values, bucket)
        if is_pending(work):
            one.await_end(work)
        return tuple(returned)


BUCKETS = _Buckets()


def _is_reducer(frame: FrameType | None) -> bool:
    """Return True if C++ that these frames have called is the reducer in a backward pass."""
    if frame is None:  # Threads that compute on a device run no Python.
        return True
    return STATE.backward > 0 and frame.f_globals.get("__name__") in _CALLERS


@functools.cache
def _collective() -> Collective:
    return Collective(torch.distributed.ProcessGroup.allreduce, COMMUNICATORS["allreduce"])


@replacing
def delaying(original: Callable[..., Any], reducer: Any) -> Any:
    """Run the method of a reducer that reduces all buckets and waits for them."""
    BUCKETS.delay(reducer)
    return original(reducer)
