"""Microseconds that a call in JAX takes longer under a tool: an eager operator, a jitted function.

`python -m maintenance.benchmarks.jax_times RESULTS.json` measures in pairs of short runs, plain and
with a tool, in one process, because other processes come and go. It writes the times, which
maintenance/backends/pages.py shows: the fastest runs of both kinds, and the median difference of a
pair.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import amanda

#: Runs are shorter than the time that a busy processor gives to a process at once.
PAIRS, WARM, CALLS = 1000, 10, 20


def _observer() -> amanda.Tool:
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        context.insert_after_op(lambda *values: None, observe=True)

    tool.add_inst_for_op(analyse)
    return tool


def _seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of a call, in the mean of a short run."""
    for _ in range(WARM):
        run()
    begin = time.perf_counter()
    for _ in range(CALLS):
        run()
    return (time.perf_counter() - begin) / CALLS


def _measured(run: Callable[[], Any], tool: amanda.Tool) -> dict[str, float]:
    """Return microseconds of a call."""
    plain, under = [], []
    for _ in range(PAIRS):
        plain.append(_seconds(run))
        with amanda.apply(tool):
            under.append(_seconds(run))
    found = {
        "plain": min(plain),
        "under the tool": min(under),
        "over plain, fastest runs": min(under) - min(plain),
        "over plain, median of pairs": statistics.median(
            slow - fast for fast, slow in zip(plain, under, strict=True)
        ),
    }
    return {name: round(seconds * 1e6, 1) for name, seconds in found.items()}


def main() -> None:
    """Measure and write the results."""
    x = jnp.ones(8)
    jitted: Any = jax.jit(lambda x: jnp.sin(x) @ x)
    found = {
        "`lax.sin`, an observer": _measured(lambda: jax.lax.sin(x), _observer()),
        "a jitted call, nothing inserted": _measured(lambda: jitted(x), amanda.Tool()),
    }
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
