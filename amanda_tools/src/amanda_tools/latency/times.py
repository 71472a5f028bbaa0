"""Times of single operators, of several together, of steps and of threads, as data."""

from __future__ import annotations

from dataclasses import dataclass

from amanda_tools.operators.entries import EitherWayOp

__all__ = ["StepTime", "ThreadTime", "TimedOp", "Times"]


@dataclass
class TimedOp(EitherWayOp):
    """One operator, or one backward operator. Times are in nanoseconds.

    Attributes:
        calls: How often it ran to its end.
        unfinished: How often it began and did not end: an exception left it, or a graph that needs
            its gradient alone left it out.
        total: Time from begin to end of all executions.
        self: The same without the operators that ran inside of it.
        first: Time of the first execution, which often includes preparations.
        shortest: Time of the shortest execution.
        longest: Time of the longest execution.
        device: Device that its work was timed on, or None.
        device_total: Time on the device from begin to end.
        device_self: The same without the operators inside.
        kernels: How many kernels it started itself, where they were looked for.
        kernel_time: Their time on the device.
    """

    calls: int = 0
    unfinished: int = 0
    total: int = 0
    self: int = 0
    first: int = 0
    shortest: int = 0
    longest: int = 0
    device: str | None = None
    device_total: int = 0
    device_self: int = 0
    kernels: int = 0
    kernel_time: int = 0

    def add(self, total: int, own: int) -> None:
        """Add one execution."""
        if not self.calls:
            self.first = self.shortest = total
        self.calls += 1
        self.total += total
        self.self += own
        self.shortest = min(self.shortest, total)
        self.longest = max(self.longest, total)


@dataclass
class Times:
    """What several operators took together. Times are in nanoseconds.

    Attributes:
        calls: Executions, forward.
        forward: Their self time.
        backward_calls: Executions of backward operators.
        backward: Their self time.
        between: Time between the operators, of modules alone: Python, the driver, other tools.
        device: Self time on the device, both ways.
        kernel_time: Time of the kernels, both ways.
    """

    calls: int = 0
    forward: int = 0
    backward_calls: int = 0
    backward: int = 0
    between: int = 0
    device: int = 0
    kernel_time: int = 0

    @property
    def self(self) -> int:
        """Self time, both ways."""
        return self.forward + self.backward

    @property
    def time(self) -> int:
        """Self time, and that between the operators."""
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


@dataclass
class StepTime:
    """One step. Times are in nanoseconds.

    Attributes:
        number: From 0.
        wall: From its begin to its end; the first begins with its first operator.
        ops: Self times of the operators in it; of a graph's, the time in which at least one ran.
        tool: Time that the profiler itself took in it.
        calls: Executions in it.
        ended: Whether its end was seen; else it counts to its last operator.
    """

    number: int
    wall: int = 0
    ops: int = 0
    tool: int = 0
    calls: int = 0
    ended: bool = False

    @property
    def rest(self) -> int:
        """Time between operators: the program itself, the driver, other tools, waiting."""
        return self.wall - self.ops - self.tool


@dataclass
class ThreadTime:
    """What ran to its end on one thread.

    Attributes:
        name: Of the thread.
        calls: Executions.
        self: Their self time, in nanoseconds.
    """

    name: str
    calls: int = 0
    self: int = 0
