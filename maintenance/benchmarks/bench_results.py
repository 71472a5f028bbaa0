"""Results of the benchmark, as they are written."""

from __future__ import annotations

from dataclasses import dataclass, field

from .bench_apply import Entering
from .bench_memory import Memory
from .bench_timing import Comparison

__all__ = ["Results"]


@dataclass
class Results:
    """Results of the benchmark.

    Attributes:
        mode: ``full`` or ``quick``.
        machine: Facts about the machine.
        versions: Package -> version.
        missing: Interceptor -> reason why it is not measured.
        programs: Subject -> ``forward`` or ``training step`` -> timings of the ways.
        operators: Number of operators -> timings.
        tools: Timings with several tools.
        caching: Subject -> timings, cached and uncached.
        entering: Interceptor -> seconds.
        after: Run -> ratios of processes in which tools were and were not applied.
        memory: Way -> memory in use.
        seconds: Duration of the measurements.
    """

    mode: str
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    missing: dict[str, str] = field(default_factory=dict)
    programs: dict[str, dict[str, Comparison]] = field(default_factory=dict)
    operators: dict[int, Comparison] = field(default_factory=dict)
    tools: Comparison | None = None
    caching: dict[str, Comparison] = field(default_factory=dict)
    entering: dict[str, Entering] = field(default_factory=dict)
    after: dict[str, dict[str, float]] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    seconds: float = 0.0
