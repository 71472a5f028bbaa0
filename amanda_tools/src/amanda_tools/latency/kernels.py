"""Attribution of kernels to operators: ranges in a PyTorch profile, and events joined to them.

Starts and stops the profiler, names the ranges, and joins events by correlation id and time. The
profile's counts are not used, because under a dispatch mode the profiler reports operators twice.
"""

from __future__ import annotations

import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["Kernel", "Kernels", "join"]

_PREFIX = "amanda#"


class Kernel(NamedTuple):
    """One kernel or other piece of work of a device.

    Attributes:
        name: Name of the kernel.
        device: Type and number of the device, such as ``CUDA:0``.
        op: Number of the range that started it, or None.
        start: Start in nanoseconds of the profiler's clock.
        duration: Duration in nanoseconds.
    """

    name: str
    device: str
    op: int | None
    start: int
    duration: int


class Kernels:
    """A profile with a range around each operator.

    If the program runs a profiler of its own, no other is started, and the program's profile
    contains the ranges. Without a device there is nothing to find, and no profile: one holds about
    a kilobyte for each operator of ATen that runs.
    """

    def __init__(self) -> None:
        self._profile: Any = None
        self._devices: set[Any] | None = None
        self._stop: Callable[[], object] = lambda: None
        self.foreign = False

    def begin(self, number: int) -> Any:
        """Start a range; return the handle for `end`, or None if no profile would contain it."""
        from torch import profiler
        from torch.autograd import profiler as ranges

        if self._profile is None and not self.foreign:
            self.foreign = ranges._is_profiler_enabled
            if not self.foreign:
                if self._devices is None:
                    self._devices = device_activities()
                if not self._devices:
                    return None
                activities = {profiler.ProfilerActivity.CPU, *self._devices}
                profile = profiler.profile(activities=activities)
                with warnings.catch_warnings():
                    # Some releases warn of schedules, though there is none.
                    warnings.simplefilter("ignore")
                    profile.start()
                self._profile = profile
                # PyTorch crashes at the exit of a process whose profiler still runs.
                self._stop = weakref.finalize(self, self._profile.stop)
        entered: Any = ranges.record_function(f"{_PREFIX}{number}")
        entered.__enter__()
        return entered

    def end(self, entered: Any) -> None:
        """End a range."""
        entered.__exit__(None, None, None)

    def found(self) -> list[Kernel]:
        """Stop the profiler and join its kernels to the ranges."""
        if self._profile is None:
            return []
        self._stop()
        events = self._profile.profiler.kineto_results.events()
        self._profile = None
        return join(events)


def device_activities() -> set[Any]:
    """Return what PyTorch's profiler can record besides the CPU."""
    from torch import profiler

    supported: Any = profiler.supported_activities  # Untyped in torch's stubs.
    return set(supported()) - {profiler.ProfilerActivity.CPU}


def join(events: Iterable[Any], leaves: bool = False) -> list[Kernel]:
    """Find the range of each kernel in the events of Kineto.

    The correlation id of a device's event identifies the PyTorch operator that launched it, and
    that operator lies in a range on its thread.

    Args:
        events: ``profile.profiler.kineto_results.events()``.
        leaves: Use the CPU operators without inner operators as kernels.
    """
    everything = list(events)
    on_cpu = [event for event in everything if event.device_type().name == "CPU"]
    ranges: dict[int, list[tuple[int, int, int]]] = {}
    others = []
    for event in on_cpu:
        if event.name().startswith(_PREFIX):
            span = (event.start_ns(), event.end_ns(), int(event.name()[len(_PREFIX) :]))
            ranges.setdefault(event.start_thread_id(), []).append(span)
        else:
            others.append(event)
    found_in = {thread: _Ranges(spans) for thread, spans in ranges.items()}
    nowhere = _Ranges([])

    def range_of(event: Any) -> int | None:
        return found_in.get(event.start_thread_id(), nowhere).at(event.start_ns())

    if leaves:
        return [_kernel(event, range_of(event)) for event in _leaves(others)]
    launchers = {event.correlation_id(): event for event in others}
    found = []
    for event in everything:
        if event.device_type().name == "CPU" or event.is_user_annotation():
            continue
        launcher = launchers.get(event.linked_correlation_id())
        found.append(_kernel(event, None if launcher is None else range_of(launcher)))
    return found


class _Ranges:
    """Nested ranges of one thread."""

    def __init__(self, spans: list[tuple[int, int, int]]) -> None:
        #: Times from which on the range at the same index of `_numbers` is the innermost.
        self._times: list[int] = []
        self._numbers: list[int | None] = []
        open_ranges: list[tuple[int, int]] = []
        for start, end, number in sorted(spans, key=lambda span: (span[0], -span[1])):
            self._close(open_ranges, start)
            open_ranges.append((end, number))
            self._from(start, number)
        self._close(open_ranges, None)

    def at(self, time: int) -> int | None:
        index = bisect_right(self._times, time) - 1
        return None if index < 0 else self._numbers[index]

    def _close(self, open_ranges: list[tuple[int, int]], until: int | None) -> None:
        while open_ranges and (until is None or open_ranges[-1][0] <= until):
            end, _ = open_ranges.pop()
            self._from(end, open_ranges[-1][1] if open_ranges else None)

    def _from(self, time: int, number: int | None) -> None:
        self._times.append(time)
        self._numbers.append(number)


def _kernel(event: Any, op: int | None) -> Kernel:
    device = f"{event.device_type().name}:{event.device_index()}"
    return Kernel(event.name(), device, op, event.start_ns(), event.duration_ns())


def _leaves(events: list[Any]) -> list[Any]:
    """Return the events without inner events on their thread."""
    found = []
    last: dict[int, Any] = {}
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.end_ns())):
        before = last.get(event.start_thread_id())
        if before is not None and before.end_ns() <= event.start_ns():
            found.append(before)
        last[event.start_thread_id()] = event
    return [*found, *last.values()]
