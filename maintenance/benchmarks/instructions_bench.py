"""Count the instructions that instrumentation adds, which decides where differences in time are
noise.

Uses `bench_callgrind` for each way to run a model that consists almost only of overhead. Writes
docs/benchmarks/instructions.md. Without valgrind or a C compiler it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TypeAlias

import torch

from .bench_callgrind import count, counted, run
from .bench_growth import PLAIN
from .bench_machine import machine, versions
from .bench_models import SUBJECTS
from .bench_report import table
from .bench_timing import Way
from .bench_tools import ways

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "instructions.md"
INTERCEPTOR = "native"

#: Number of runs before and while counting. The first three with tools analyse and settle, and
#: Python needs some more to specialize its bytecode.
WARM, COUNTED = 16, 4

#: Instructions of one run, by model, kind of run, and way.
Counts: TypeAlias = "dict[tuple[str, str, str], int]"

INTRODUCTION = """\
# What instrumentation costs in instructions

Compare idle tools by instructions: the times in [README.md](README.md) vary from run to run by
more than an idle tool costs. `nox -s bench` writes this page.

- Valgrind's callgrind counts in one process, on one thread, from the {warm}th run with each tool
  on. The figures are means of {counted} runs, in ratio to plain torch before any tool was applied.
- The tools are those of the times.
- The model is nearly all overhead. A larger one with as many operators has the same extra
  instructions, and more of its own.
- Valgrind's processor has no AVX-512. On one that has it, plain torch executes fewer instructions
  than here.
"""


def main() -> None:
    """Count and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it is short")
    run(parser, run_inside, write)


def write(_: argparse.Namespace) -> None:
    """Count in valgrind and write the table."""
    OUTPUT.write_text(report(by_way(count(__file__))))
    print(f"Written to {OUTPUT}", file=sys.stderr)


def by_way(dumps: dict[str, int]) -> Counts:
    """Return the instructions of one run for each way, from the counts by name."""
    counts = {}
    for name, instructions in dumps.items():
        subject, kind, way = name.split("; ")
        counts[subject, kind, way] = instructions // COUNTED
    return counts


def run_inside(library: Path, _: list[str]) -> None:
    """Run the model in each way, and tell callgrind which part to count."""
    torch.set_num_threads(1)
    subject = SUBJECTS[0]
    for kind, training in (("forward", False), ("training step", True)):
        program = subject.program(training)
        tools = ways(INTERCEPTOR, program, subject.counted)
        for way in [
            Way(PLAIN, program),
            *tools,
            *(_applied_each_time(way) for way in (tools[0], tools[-1])),
            Way(f"{PLAIN}, after `apply`", program),
        ]:
            name = f"{subject.name}; {kind}; {way.name}"
            counted(library, name, way.run, way.enter(), WARM, COUNTED)


def _applied_each_time(way: Way) -> Way:
    def run_one() -> None:
        with way.enter():
            way.run()

    return Way(f"{way.name}, applied in each run", run_one)


def report(counts: Counts) -> str:
    """Return the page."""
    facts = {**machine(), **versions()}
    parts = [
        INTRODUCTION.format(warm=WARM + 1, counted=COUNTED),
        table(["machine and versions", ""], [[k, str(v)] for k, v in facts.items()]),
    ]
    for subject in dict.fromkeys(subject for subject, _, _ in counts):
        kinds = [kind for name, kind, way in counts if name == subject and way == PLAIN]
        plain = {kind: counts[subject, kind, PLAIN] for kind in kinds}
        rows = []
        for way in dict.fromkeys(way for name, _, way in counts if name == subject):
            seen = [counts[subject, kind, way] for kind in kinds]
            ratios = [f"{n / plain[kind]:.3f}" for n, kind in zip(seen, kinds, strict=True)]
            rows.append([way, *ratios])
        columns = [f"{kind} ({plain[kind] / 1e6:.2f} million)" for kind in kinds]
        parts += [f"## {subject}", table(["", *columns], rows)]
    return "\n".join(part.rstrip() + "\n" for part in parts)


if __name__ == "__main__":
    main()
