"""Instructions that an eager operator of JAX takes: plain, in JAX's Python path, under tools.

`python -m maintenance.benchmarks.jax_bench RESULTS.json` counts by valgrind's callgrind, so that
other processes do not matter, and writes the counts, which maintenance/backends/pages.py shows. JAX
runs a jitted function such as `jnp.add` in C++. Whoever intercepts operators sends it through JAX's
Python path, which is what *trace alone* does: a `jax.core.Trace` that passes each primitive on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from .bench_callgrind import count, counted, missing

WARM, CALLS = 10, 50


def _operators() -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    x, y = jnp.ones(8), jnp.ones(8)
    return {
        "jnp.add": lambda: jnp.add(x, y),
        "jnp.matmul": lambda: jnp.matmul(x, y),
        "jnp.sum": lambda: jnp.sum(x),
        "x * y": lambda: x * y,
        "lax.sin": lambda: jax.lax.sin(x),
        "jax.nn.relu": lambda: jax.nn.relu(x),
    }


@contextmanager
def _trace_alone() -> Iterator[None]:
    import jax
    from jax._src.core import eval_trace
    from jax.extend.core import set_current_trace

    class Passing(jax.core.Trace):  # type: ignore[misc]
        def process_primitive(self, primitive: Any, tracers: Any, params: Any) -> Any:
            return eval_trace.process_primitive(primitive, tracers, params)

        def process_custom_jvp_call(self, *args: Any, **kwargs: Any) -> Any:
            return eval_trace.process_custom_jvp_call(*args, **kwargs)

    with set_current_trace(Passing()):
        yield


def _applied(*, acts: bool) -> AbstractContextManager[object]:
    import amanda

    def analyse(context: amanda.OpContext) -> None:
        if acts:
            context.insert_after_op(lambda *values: None, observe=True)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    return amanda.apply(tool)


#: What is measured: name -> the surroundings of the calls.
WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "trace alone": _trace_alone,
    "a tool that does nothing there": lambda: _applied(acts=False),
    "an observer on the host": lambda: _applied(acts=True),
}


def _inside(library: str) -> None:
    for operator, run in _operators().items():
        for way, surroundings in WAYS.items():
            counted(Path(library), f"{operator}: {way}", run, surroundings(), WARM, CALLS)


def main() -> None:
    """Count and write the results."""
    if sys.argv[1] == "--inside":
        _inside(sys.argv[2])
        return
    if missing():
        sys.exit(f"Not installed: {', '.join(missing())}")
    found: dict[str, dict[str, int]] = {}
    for name, instructions in count(__file__).items():
        operator, _, way = name.partition(": ")
        found.setdefault(operator, {})[way] = round(instructions / CALLS)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
