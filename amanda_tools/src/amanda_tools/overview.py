"""The overview of `amanda run` without -t: where time, memory and compute of a program go.

Owns which tools that needs, and the sentences that their results give together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from amanda_core.results import Result
from amanda_tools.flops import FlopsResult
from amanda_tools.kit.operators.sums import Summed
from amanda_tools.kit.output.rendering import format_count, format_percent, format_quantity
from amanda_tools.latency.result import LatencyResult
from amanda_tools.latency.times import quantiles
from amanda_tools.memory.result import KINDS, MemoryResult
from amanda_tools.summary import SummaryResult

__all__ = ["OVERVIEW", "TrainingOverview"]

#: How many types and modules a line names.
_NAMED = 3


class TrainingOverview:
    """The tools that answer the first questions about a program, and their answers.

    Attributes:
        tools: The tools, as after ``-t``.
    """

    tools = ("summary", "latency", "memory", "flops")

    def lines(self, results: Mapping[str, Result]) -> Sequence[str]:
        """Return at most nine sentences about these results."""
        return [line for result in results.values() for line in _lines_of(result)]


#: The entry point.
OVERVIEW = TrainingOverview()


def _lines_of(result: object) -> Iterator[str]:
    if isinstance(result, SummaryResult):
        yield from _model(result)
    elif isinstance(result, LatencyResult):
        yield from _time(result)
    elif isinstance(result, MemoryResult):
        yield from _memory(result)
    elif isinstance(result, FlopsResult):
        yield from _compute(result)


def _model(result: SummaryResult) -> Iterator[str]:
    names = [row.type or row.name for row in result.modules if not row.depth]
    more = ", ..." if len(names) > _NAMED else ""
    if names:
        count = format_count(len(result.modules), "module")
        yield (
            f"model: {', '.join(names[:_NAMED])}{more}: {count}, "
            f"{format_count(result.parameters, 'parameter')}, "
            f"{format_quantity(result.macs, 'MACs')} in one forward pass"
        )


def _time(result: LatencyResult) -> Iterator[str]:
    steps = result.ended
    if any(step.wall for step in steps):
        wall, ops = (
            quantiles(times)[0]
            for times in ([step.wall for step in steps], [step.ops for step in steps])
        )
        # Other tools work between operators: that time is not the program's.
        tools = ", these tools included" if result.others else ""
        yield (
            f"time: {wall / 1e6:.3f} ms for a step (median of {len(steps)}){tools}; "
            f"{ops / 1e6:.3f} ms in operators"
        )
    yield from _most("time in operators", result, lambda found: found.typical)


def _memory(result: MemoryResult) -> Iterator[str]:
    if not result.is_known:
        peaks = [
            f"the peak of {device} is {format_quantity(found['peak'], 'B')}"
            for device, found in result.allocators.items()
        ]
        yield "memory: " + (
            ", ".join(peaks) or "not known, since the buffers of graphs are not visible"
        )
        return
    kinds = [
        f"{format_quantity(result.kinds_at_peak[kind], 'B')} {kind}"
        for kind in KINDS
        if result.kinds_at_peak.get(kind)
    ]
    peak = sum(result.kinds_at_peak.values()) or result.peak
    after = f" after {result.peak_op}" if result.peak_op else ""
    held = f": {', '.join(kinds)}" if kinds else ""
    yield f"memory: {format_quantity(peak, 'B')} at the peak{after}{held}"
    yield from _most("memory of operators then", result, lambda found: found.at_peak)


def _compute(result: FlopsResult) -> Iterator[str]:
    total = result.total
    units = [*result.passes[:1], *([] if result.step is None else [result.step])]
    in_all = f"in all {format_quantity(total.macs + total.backward_macs, 'MACs')}"
    line = f"compute: {'; '.join([*(unit.describe() for unit in units), in_all])}"
    if result.unknown:
        line += f"; {format_count(len(result.unknown), 'operator')} not counted"
    yield line
    yield from _most("MACs", result, lambda found: found.macs + found.backward_macs)


def _most(what: str, result: Summed[Any], of: Callable[[Any], int]) -> Iterator[str]:
    """Say which types of operators and which modules have the largest shares."""
    total = of(result.total)
    if total <= 0:
        return
    types = {name: of(found) for name, found in result.by_type().items()}
    own: dict[str, int] = {}
    for op in result.ops:
        own[op.module] = own.get(op.module, 0) + of(result._sum_of([op]))
    own.pop("", None)
    parts = [_largest(types, total), _largest(own, total)]
    yield f"{what}: {'; by layer '.join(part for part in parts if part)}"


def _largest(sums: Mapping[str, int], total: int) -> str:
    named = sorted(sums.items(), key=lambda item: -item[1])[:_NAMED]
    return ", ".join(f"{name} {format_percent(part, total)}" for name, part in named if part > 0)
