"""The time of the driver in a step: what it takes more than the steps without the profiler."""

from __future__ import annotations

from collections.abc import Sequence

from amanda_tools.latency.times import DRIVER, StepTime, ThreadTime, TimedOp

__all__ = ["AGAIN", "MEASURED", "PLAIN", "charge_driver", "subtract_inside", "without_driver"]

#: Steps that run without the profiler, four in a row. In the first the driver analyses operators
#: again, and in the second, gradients may still have something of the profiler, so the times of
#: the others say what a step takes without it.
PLAIN = [first + place for first in (5, 20, 50, 200, 500, 2000, 5000) for place in range(4)]
#: The steps after these, in which tools analyse operators again; left out like the warm-up.
AGAIN = frozenset(number + 1 for place, number in enumerate(PLAIN) if place % 4 == 3)
MEASURED = frozenset(number for place, number in enumerate(PLAIN) if place % 4 > 1)


def charge_driver(steps: Sequence[StepTime], plain: int) -> None:
    """Count what steps took more than a plain one as time of the driver."""
    for step in steps:
        cost = step.wall - step.tool - plain
        step.driver += max(0, min(step.rest, cost - step.driver))


def without_driver(between: dict[str, int], steps: Sequence[StepTime]) -> dict[str, int]:
    """Return the time between operators by module, with that of the driver as one of its own."""
    counted = [step for step in steps if not step.warm_up]
    rest, left = sum(step.rest for step in counted), sum(between.values())
    driver = sum(step.driver for step in counted)
    found = (
        {module: time * max(0, rest) // left for module, time in between.items()} if left else {}
    )
    if found and rest > 0:
        largest = max(found, key=lambda module: found[module])
        found[largest] += rest - sum(found.values())
    return found | ({DRIVER: driver} if driver else {})


def subtract_inside(
    ops: list[TimedOp], steps: list[StepTime], thread: ThreadTime, plain: int
) -> None:
    """Move time from operators to the driver if together they take more than a step without both.

    What the operators of each timed step exceed the longest such step by is certainly not theirs.
    A comparison of medians would subtract noise: of few steps they differ by a tenth and more.
    Each execution has the same part, at most its own time.
    """
    counted = [step for step in steps if step.ended and not step.warm_up]
    inside = min((step.ops for step in counted), default=0) - plain
    if inside <= 0:
        return
    for step in counted:
        step.driver = min(inside, step.ops)
        step.ops -= step.driver
    left, calls = sum(step.driver for step in counted), sum(op.calls for op in ops)
    thread.self -= left
    for op in sorted((op for op in ops if op.calls), key=lambda op: op.self / op.calls):
        part = min(op.self, left * op.calls // calls)
        op.self -= part
        left, calls = left - part, calls - op.calls
