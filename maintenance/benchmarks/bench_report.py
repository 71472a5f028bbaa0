"""Write the results as JSON for programs and as Markdown for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from .bench_growth import PLAIN
from .bench_results import Results
from .bench_timing import Comparison, Timing

__all__ = ["table", "write_json", "write_markdown"]

INTRODUCTION = """\
# What instrumentation costs

This page shows the cost of each kind of tool on PyTorch, in ratio to the plain program.
`nox -s bench` writes it; [results.json](results.json) has more figures.

- The ways to run a program take turns in one process, in an order that changes from round to
  round. The garbage collector runs between turns only.
- Times are processor times on one thread. A ratio is one of two medians, followed by the quartiles
  of the ratios of the single rounds.
- The second row of plain torch shows the noise: the difference between two measurements of the
  same. An idle tool often costs less; [instructions.md](instructions.md) counts its instructions,
  which have no noise.
"""

TOOLS = """\
Five kinds of tools are applied with each interceptor:

- one with all four analysis routines, which inserts nothing;
- one that counts all linears (in ResNet: convolutions) forward;
- one that counts them forward, and backward by the gradient that arrives at their output;
- one that is called forward, and backward with the gradients of all inputs of each of them;
- one that calls an empty routine before every operator, forward and backward.

The peers look and do nothing, except FlopCounterMode, which counts, and TorchLens, which records a
whole forward call with its values: do not compare its row with the others, which record nothing.
What does as much here is `dump`, in [what each tool costs](tools.md).
"""

QUICK = """\
**A quick run**: fewer models and rounds, and more noise. `nox -s bench` runs everything.
"""

#: Cell without a figure.
NONE = "-"


def write_json(results: Results, path: Path) -> None:
    """Write all results as JSON."""
    path.write_text(json.dumps(asdict(results), indent=1) + "\n")


def write_markdown(results: Results, path: Path) -> None:
    """Write the tables for people."""
    parts = [INTRODUCTION, *_setting(results), *_programs(results), *_apply(results)]
    parts += [*_operators(results), *_tools(results), *_caching(results), *_memory(results)]
    path.write_text("\n".join(part.rstrip() + "\n" for part in parts))


def _setting(results: Results) -> list[str]:
    parts = []
    if results.mode == "quick":
        parts.append(QUICK)
    facts = {**results.machine, **results.versions, "minutes": f"{results.seconds / 60:.1f}"}
    parts.append(table(["machine and versions", ""], [[k, str(v)] for k, v in facts.items()]))
    parts += [f"Interceptor `{name}`: not built ({why})." for name, why in results.missing.items()]
    parts.append("![The figures of the tables below](results.png)")
    return parts


def _programs(results: Results) -> list[str]:
    parts = ["## Ratio to plain torch", TOOLS]
    for subject, runs in results.programs.items():
        columns = [
            f"{name} ({_time(compared.timings[PLAIN].cpu)})" for name, compared in runs.items()
        ]
        rows = [
            [way, *(_cell(compared, way) for compared in runs.values())]
            for way in _names(runs.values())
        ]
        parts += [f"### {subject}", table(["", *columns], rows)]
    return parts


def _apply(results: Results) -> list[str]:
    rows = [
        [name, _time(times.first), _time(times.enter), _time(times.leave)]
        for name, times in results.entering.items()
    ]
    parts = [
        "## Entering and leaving `apply`",
        "The first time includes the search for drivers, except for the second interceptor.",
        table(["interceptor", "first time, both", "enter", "leave"], rows),
        "## After `apply`",
        "Narrow BERT in forked processes that take turns, in ratio to a process that never\n"
        "applied a tool.",
    ]
    names = list(dict.fromkeys(name for ratios in results.after.values() for name in ratios))
    rows = [[name, *(f"{ratios[name]:.3f}" for ratios in results.after.values())] for name in names]
    return [*parts, table(["", *results.after], rows)] if names else parts[:3]


def _operators(results: Results) -> list[str]:
    def extra(compared: Comparison, way: str) -> str:
        length = next(n for n, held in results.operators.items() if held is compared)
        return _micro((compared.timings[way].cpu - compared.timings[PLAIN].cpu) / length)

    def first(compared: Comparison, way: str) -> str:
        length = next(n for n, held in results.operators.items() if held is compared)
        return _micro(compared.timings[way].first / length)

    columns = ["", *(f"{length:,} ops" for length in results.operators)]
    names = [way for way in _names(results.operators.values()) if way != PLAIN]
    return [
        "## As the number of operators grows",
        "The extra cost of one operator of a chain over plain torch, without gradients:",
        table(columns, _rows(names, results.operators.values(), extra)),
        "The time of one operator in the first run, in which it is analysed:",
        table(columns, _rows(names, results.operators.values(), first)),
    ]


def _tools(results: Results) -> list[str]:
    if results.tools is None:
        return []
    rows = [[way, _cell(results.tools, way)] for way in results.tools.timings]
    return ["## As the number of tools grows", table(["narrow BERT, forward", "ratio"], rows)]


def _caching(results: Results) -> list[str]:
    columns = ["ratio to plain torch, forward", *results.caching]
    held = list(results.caching.values())
    return [
        "## With and without the cache",
        "Without the cache all analysis runs at every execution (figure 12 of the paper). The\n"
        "analysis of pruning computes the masks.",
        table(columns, _rows(_names(held), held, _cell)),
    ]


def _memory(results: Results) -> list[str]:
    rows = []
    for name, seen in results.memory.items():
        middle = len(seen.iterations) // 2
        rows.append(
            [
                name,
                f"{seen.resident[middle] / 2**20:.1f}",
                f"{(seen.resident[-1] - seen.resident[middle]) / 2**20:+.2f}",
                f"{seen.blocks[-1] - seen.blocks[middle]:+d}",
            ]
        )
    last = max((seen.iterations[-1] for seen in results.memory.values()), default=0)
    columns = ["", "MiB at half", "MiB since then", "Python blocks since then"]
    return [
        f"## Memory over {last:,} iterations",
        "A training step of a small network, with all operators instrumented in both directions.",
        table(columns, rows),
    ]


def _rows(
    names: Iterable[str],
    comparisons: Iterable[Comparison],
    cell: Callable[[Comparison, str], str],
) -> list[list[str]]:
    held = list(comparisons)
    return [[name, *(cell(c, name) if name in c.timings else NONE for c in held)] for name in names]


def _names(comparisons: Iterable[Comparison]) -> list[str]:
    return list(dict.fromkeys(n for c in comparisons for n in (*c.timings, *c.failed)))


def _cell(compared: Comparison, way: str) -> str:
    timing: Timing | None = compared.timings.get(way)
    if timing is None:
        # Only the first sentence; the JSON has the whole message.
        return compared.failed.get(way, NONE).partition(". ")[0]
    digits = 3 if timing.ratio < 2 else 2 if timing.ratio < 10 else 1
    low, high = (f"{value:.{digits}f}" for value in (timing.low, timing.high))
    return f"**{timing.ratio:.{digits}f}** ({low} to {high})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else _micro(seconds)


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.2f} µs"
