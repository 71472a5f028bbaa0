"""Times of operators, of groups of operators, of steps and of threads, as data."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from amanda_tools.kit.operators.entries import EitherWayOp

__all__ = [
    "DRIVER",
    "MOST_WARM_UP",
    "Samples",
    "StepTime",
    "ThreadTime",
    "TimedOp",
    "Times",
    "quantiles",
    "warm_up",
]

#: Stands in place of a module for what the driver takes to call the profiler.
DRIVER = "(driver, to call it)"
#: How many of the first steps may be the warm-up, if the user does not say how many are.
MOST_WARM_UP = 10

#: Maximum number of executions of an operator from which its percentiles are computed.
_SAMPLES = 512


@dataclass
class TimedOp(EitherWayOp):
    """Times of one operator or backward operator, in nanoseconds.

    Attributes:
        calls: Number of executions that ended.
        unfinished: Number of executions that did not end: an exception left them, or a graph
            computed the gradient without the operator itself.
        total: Time of all executions from start to end.
        self: Time of all executions without the operators that ran inside them, and without what
            is certainly the driver's; see `StepTime.driver`.
        typical: `self`, if each execution took the median time.
        median: Median time of an execution.
        p95: Time that 95% of the executions do not exceed.
        first: Time of the first execution, which often includes initialization.
        shortest: Time of the shortest execution.
        longest: Time of the longest execution.
        spread: Difference of the 75th and the 25th percentile.
        device: Device on which its work was timed, or None.
        device_total: Time on the device from start to end.
        device_self: Time on the device without the operators inside.
        kernels: Number of kernels that it started itself, if requested.
        kernel_time: Time of these kernels on the device.
        waits: Whether it communicates with other processes, so that its time is that of the call
            and of waiting for it, without what the program does until it waits.
        operators: Of a kernel of compiled code, the names of the operators that it computes, or
            whose gradients.
    """

    calls: int = 0
    unfinished: int = 0
    total: int = 0
    self: int = 0
    typical: int = 0
    median: int = 0
    p95: int = 0
    first: int = 0
    shortest: int = 0
    longest: int = 0
    spread: int = 0
    device: str | None = None
    device_total: int = 0
    device_self: int = 0
    kernels: int = 0
    kernel_time: int = 0
    waits: bool = False
    operators: list[str] = field(default_factory=list)

    def estimate(self) -> None:
        """Set `typical`."""
        own, whole = self.self * self.median * self.calls, self.total
        self.typical = round(own / whole) if whole else self.self

    def add(self, total: int, own: int) -> None:
        """Add one execution."""
        if not self.calls:
            self.first, self.shortest = self.first or total, total
        self.calls += 1
        self.total += total
        self.self += own
        if total < self.shortest:
            self.shortest = total
        if total > self.longest:
            self.longest = total

    def add_all(self, totals: Sequence[int], own: int) -> None:
        """Add executions, given the time of each and their time without what is inside."""
        first, *others = totals
        self.add(first, own)
        self.calls += len(others)
        self.total += sum(others)
        self.shortest = min(self.shortest, *totals)
        self.longest = max(self.longest, *totals)

    def emptied(self) -> TimedOp:
        """Return a copy without executions, in which `first` stays."""
        # Not by `dataclasses.replace`, which reads and checks each field: in the first steps, all
        # accounts are copied in each.
        new = object.__new__(TimedOp)
        vars(new).update(vars(self), **_EMPTY)
        return new

    def merge(self, earlier: TimedOp) -> None:
        """Add the executions of an earlier account of the same operator."""
        if not earlier.calls:
            shortest = self.shortest
        else:
            self.first = earlier.first
            shortest = min(earlier.shortest, self.shortest if self.calls else earlier.shortest)
        self.shortest, self.longest = shortest, max(self.longest, earlier.longest)
        for name in ("calls", "unfinished", "total", "self", "device_total", "device_self"):
            setattr(self, name, getattr(self, name) + getattr(earlier, name))


#: Figures of an account without executions.
_EMPTY: dict[str, int] = dict.fromkeys(
    ("calls", "unfinished", "total", "self", "shortest", "longest", "device_total", "device_self"),
    0,
)


class Samples:
    """A bounded choice of the executions of one operator, at equal distances.

    Attributes:
        chosen: Their times, in nanoseconds.
    """

    def __init__(self) -> None:
        self.chosen = array("q")
        self._stride = 1
        self._seen = 0

    def add(self, time: int) -> None:
        """Add one execution."""
        if self._seen % self._stride == 0:
            if len(self.chosen) == _SAMPLES:
                self.chosen, self._stride = self.chosen[::2], 2 * self._stride
            if self._seen % self._stride == 0:
                self.chosen.append(time)
        self._seen += 1

    def extend(self, times: Sequence[int]) -> None:
        """Add executions."""
        chosen = times[-self._seen % self._stride :: self._stride]
        if len(self.chosen) + len(chosen) <= _SAMPLES:
            self.chosen.extend(chosen)
            self._seen += len(times)
        else:
            for time in times:
                self.add(time)

    def quantiles(self) -> tuple[int, int, int]:
        """Return the median, the 95th percentile and the spread."""
        return quantiles(self.chosen)


def quantiles(times: Iterable[int]) -> tuple[int, int, int]:
    """Return the median, the 95th percentile, and the 75th minus the 25th percentile.

    >>> quantiles(range(101))
    (50, 95, 50)
    """
    found = sorted(times)
    if not found:
        return 0, 0, 0
    low, middle, high, last = (
        found[round((len(found) - 1) * part)] for part in (0.25, 0.5, 0.75, 0.95)
    )
    return middle, last, high - low


def warm_up(times: Sequence[int]) -> int:
    """Return how many of the first steps are not like the later ones.

    The first step is not: the framework initializes and tools analyse there. Neither is a step
    after it that takes over one and a half times the median of the later steps.

    Args:
        times: Times of the steps.

    >>> warm_up([90, 40, 10, 11, 10]), warm_up([90, 10]), warm_up([90])
    (2, 1, 0)
    """
    most = min(MOST_WARM_UP, len(times) - 1)
    for left_out in range(1, most):
        if 2 * times[left_out] <= 3 * quantiles(times[left_out + 1 :])[0]:
            return left_out
    return most


@dataclass
class Times:
    """Times of several operators together, in nanoseconds.

    Attributes:
        calls: Number of forward executions.
        forward: Self time of the forward executions.
        backward_calls: Number of executions of backward operators.
        backward: Self time of these.
        between: Time between the operators of a module: Python, the driver, other tools.
        device: Self time on the device, forward and backward.
        kernel_time: Time of the kernels, forward and backward.
        typical: Self time if each execution took the median time of its operator, which orders
            rankings: one slow execution does not.
    """

    calls: int = 0
    forward: int = 0
    backward_calls: int = 0
    backward: int = 0
    between: int = 0
    device: int = 0
    kernel_time: int = 0
    typical: int = 0

    @property
    def self(self) -> int:
        """Return the self time, forward and backward."""
        return self.forward + self.backward

    @property
    def time(self) -> int:
        """Return the self time plus the time between operators."""
        return self.self + self.between

    def add(self, op: TimedOp) -> None:
        """Add one operator."""
        if op.phase == "forward":
            self.calls += op.calls
            self.forward += op.self
        else:
            self.backward_calls += op.calls
            self.backward += op.self
        self.device += op.device_self
        self.kernel_time += op.kernel_time
        self.typical += op.typical


@dataclass
class StepTime:
    """Times of one step, in nanoseconds.

    Attributes:
        number: Number of the step, from 0.
        wall: Time from start to end. The first step starts with its first operator.
        ops: Self times of its operators; for a graph, the time in which at least one was running.
        tool: Time spent in the profiler itself.
        driver: Estimated time that the driver takes to call the profiler. Inside operators, it is
            what they take in each step beyond the longest step without the profiler.
        calls: Number of executions.
        warm_up: Whether it is left out of all sums.
        ended: Whether its end was seen. Otherwise it counts up to its last operator.
    """

    number: int
    wall: int = 0
    ops: int = 0
    tool: int = 0
    driver: int = 0
    calls: int = 0
    warm_up: bool = False
    ended: bool = False

    @property
    def rest(self) -> int:
        """Return the time between operators: in the program, other tools, waiting."""
        return self.wall - self.ops - self.tool - self.driver


@dataclass
class ThreadTime:
    """Executions that ended on one thread.

    Attributes:
        name: Name of the thread.
        calls: Number of executions.
        self: Their self time in nanoseconds.
    """

    name: str
    calls: int = 0
    self: int = 0
