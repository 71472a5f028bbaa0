"""Threads of distribution strategies: replicas that run eagerly, and functions sent to workers.

Owns how a replica's thread takes part in a session, and what is refused. A strategy runs its
replicas one after the other, so that no two threads are instrumented at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from amanda_core.driver_kit import THREAD, Patches
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.identity.places import Forward
from amanda_driver_tf.tensorflow_internals.entry_points import (
    REPLICA_MERGE_CALL,
    REPLICA_THREAD_RUN,
    REPLICA_THREAD_START,
    SCHEDULE,
)
from amanda_driver_tf.tensorflow_internals.tapes import executes_eagerly
from amanda_driver_tf.threads import STATE

__all__ = ["Replica", "refuse_in_replica", "replace"]

_ATTRIBUTE = "_amanda_lender"


def replace(patches: Patches) -> None:
    """Replace the functions that start replicas and send functions."""
    for entry_point, make in (
        (REPLICA_THREAD_START, _started),
        (REPLICA_THREAD_RUN, _running),
        (REPLICA_MERGE_CALL, _merging),
        (SCHEDULE, _sending),
    ):
        patches.replace(*entry_point, make(vars(entry_point.owner)[entry_point.name]))


class Replica(Forward):
    """The forward program of one replica, in the thread in which its strategy runs it.

    Attributes:
        is_last: Whether it is the last of the replicas, which run in turns.
    """

    __slots__ = ("is_last",)

    def __init__(self, lender: Forward, is_last: bool) -> None:
        super().__init__(lender.program, lender.activations)
        self.is_last = is_last


def refuse_in_replica() -> None:
    """Refuse to apply more tools in the thread of a replica, where only that replica would see
    them.
    """
    if isinstance(STATE.eager, Replica):
        raise UnsupportedError(
            "Tools cannot be applied inside a replica that runs eagerly under other tools",
            fix="Apply them around strategy.run",
        )


def _started(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        place = STATE.eager
        if isinstance(place, Forward) and not STATE.quiet and executes_eagerly():
            setattr(self, _ATTRIBUTE, (STATE.functions, STATE.graphs, place))

    return __init__


def _running(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any) -> Any:
        lent = self.__dict__.pop(_ATTRIBUTE, None)
        if lent is None:
            return original(self)
        functions, graphs, place = lent
        replica = Replica(place, self.replica_id + 1 == len(self.devices))
        return _call_watched(functions, graphs, replica, original, self)

    return run


def _call_watched(
    functions: Any, graphs: Any, place: Replica, run: Callable[..., Any], *args: Any
) -> Any:
    """Call `run` while the calling thread acts as the one that entered `apply`."""
    before = THREAD.control, THREAD.session
    try:
        # The switches are those of the waiting thread, which may disable instrumentation.
        THREAD.control, THREAD.session = place.control, place.session
        STATE.functions, STATE.graphs, STATE.eager = functions, graphs, place
        return run(*args)
    finally:  # The thread ends with this call.
        THREAD.control, THREAD.session = before
        STATE.functions = STATE.graphs = STATE.eager = None


def _merging(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _merge_call(self: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        place = STATE.eager
        return original(self, _within(place, fn) if type(place) is Replica else fn, args, kwargs)

    return _merge_call


def _within(replica: Replica, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn`, which the thread of `apply` calls for all replicas, as a part of their program."""
    activations = list(replica.activations)

    @functools.wraps(fn)
    def merged(*args: Any, **kwargs: Any) -> Any:
        place = STATE.eager
        if not isinstance(place, Forward):
            return fn(*args, **kwargs)
        before, place.activations = place.activations, activations
        try:
            return fn(*args, **kwargs)
        finally:
            place.activations = before

    return merged


def _sending(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def schedule(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        watching = STATE.functions
        if watching is not None and not STATE.quiet and watching.session.enabled:
            raise UnsupportedError(
                f"A ClusterCoordinator sends the function {getattr(fn, '__name__', fn)!r} to a "
                "worker, which the applied tools cannot instrument",
                fix="Call the function itself, or schedule it inside amanda.disabled()",
            )
        return original(self, fn, *args, **kwargs)

    return schedule
