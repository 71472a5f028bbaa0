"""Memory over very many iterations, cached and uncached."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import amanda

from .bench_models import small_program
from .bench_tools import EveryOp, applied

__all__ = ["Memory", "memory"]

CHECKPOINTS = 20


@dataclass(frozen=True)
class Memory:
    """Memory in use while a program runs for many iterations.

    Attributes:
        iterations: Numbers of the iterations at which it was measured.
        blocks: Allocated blocks of the Python interpreter after garbage collection.
        resident: Resident bytes of the process.
    """

    iterations: list[int]
    blocks: list[int]
    resident: list[int]


def memory(interceptors: Sequence[str], iterations: int) -> dict[str, Memory]:
    """Run a small training step `iterations` times in each way, with every op instrumented."""
    results = {"plain torch": _watch(nullcontext, iterations)}
    for name in interceptors:
        for caching in (True, False):
            extent = _extent(name, caching)
            results[f"amanda {name}: {'cached' if caching else 'uncached'}"] = _watch(
                extent, iterations
            )
    return results


def _extent(name: str, caching: bool) -> Callable[[], AbstractContextManager[object]]:
    def enter() -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(applied(name, EveryOp())())
        if not caching:
            stack.enter_context(amanda.cache_disabled())
        return stack

    return enter


def _watch(enter: Callable[[], AbstractContextManager[object]], iterations: int) -> Memory:
    program = small_program(training=True)
    seen = Memory([], [], [])
    pause = max(1, iterations // CHECKPOINTS)
    with enter():
        for number in range(1, iterations + 1):
            program()
            if number % pause == 0:
                gc.collect()
                seen.iterations.append(number)
                seen.blocks.append(sys.getallocatedblocks())
                seen.resident.append(_resident())
    return seen


def _resident() -> int:
    counts = Path("/proc/self/statm")
    if counts.exists():
        return int(counts.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Elsewhere only the peak is known, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
