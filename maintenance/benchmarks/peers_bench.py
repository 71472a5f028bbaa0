"""Measure tools beside what people use today for the same tasks: warm, and for one step.

Writes docs/benchmarks/peers.md. Each way runs in a process of its own, since some replace parts of
torch for good when they are imported. Run it with `nox -s bench`, or separately in ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import io
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .bench_machine import machine, versions
from .bench_models import SUBJECTS, Program
from .bench_report import table
from .peers_ways import TASKS, Task, Tensor

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "peers.md"

#: Packages whose versions the page names.
PEERS = ("calflops", "fvcore", "nnsight", "torchao", "torchlens")

INTRODUCTION = """\
# Beside other libraries

Use this page to choose a library for one of these tasks by what it costs. The rows of a task do it
on the same model, in ratio to the plain model. `nox -s bench` writes this page.

- *one-shot* is a new tool, one step under it, and its result, the median of {once} times after an
  unmeasured one. Importing the library is not counted.
- *warm* is a step under a tool that stays applied, the median from step {warm} on. Libraries that
  are called for each step have no other figure there.
- *found* is what the way reported: compare rows only where it is equal. `detect_anomaly` looks at
  gradients alone, torchao quantizes linear layers alone, and the profiler counts kinds of operators
  of ATen. Amanda's tools also name each operator, its module and its source line.
- Times are processor times on one thread, in a process of its own for each way, with plain steps
  before and after it.
- Settings are those that each library's documentation shows for the task.
- A tool that stays applied costs less than libraries that count or trace in Python, and more than
  a few hooks of one's own or a profiler in C++. One step alone pays for the analysis of each
  operator, 0.2 to 0.3 ms: there most others are cheaper.
"""

#: How many times a new tool is used for one step, and the steps of a tool that stays applied.
ONCE, WARM, STEPS = 5, 10, 15


def timed(step: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def measure(subject: str, task: Task, name: str) -> dict[str, Any]:
    """Return the ratios of one way to the plain program, and what it found."""
    chosen = next(s for s in SUBJECTS if s.name == subject)
    torch.manual_seed(0)
    model, batch = chosen.make()
    program = Program(Tensor(model), batch, task.training)
    way = task.ways[name]
    found = ""

    def once() -> None:
        nonlocal found
        with contextlib.redirect_stdout(io.StringIO()), way(program) as session:
            session.step()
            found = session.result()

    for _ in range(3):
        program()
    once()
    plain, shots, warm = [], [], []
    for _ in range(ONCE):
        gc.collect()
        plain.append(timed(program))
        shots.append(timed(once))
    with contextlib.redirect_stdout(io.StringIO()), way(program) as session:
        for _ in range(WARM):
            session.step()
        gc.collect()
        warm = [timed(session.step) for _ in range(STEPS)]
    plain += [timed(program) for _ in range(STEPS)]
    base = statistics.median(plain)
    return {
        "once": statistics.median(shots) / base,
        "warm": statistics.median(warm) / base,
        "found": found,
        "plain": base * 1e3,
    }


def report(figures: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> str:
    """Return the page, given task -> way -> subject -> figures."""
    facts = {**machine(), **versions()}
    facts |= {name: importlib.metadata.version(name) for name in PEERS}
    parts = [
        INTRODUCTION.format(once=ONCE, warm=WARM + 1),
        table(["machine and versions", ""], [[k, str(v)] for k, v in facts.items()]),
    ]
    for key, ways in figures.items():
        columns, rows = [""], []
        for subject in next(iter(ways.values())):
            columns += [f"{subject}, warm", "one-shot", "found"]
        for name, found in ways.items():
            cells = [name]
            for row in found.values():
                cells += [_ratio(row["warm"]), _ratio(row["once"]), row["found"]]
            rows.append(cells)
        parts += [f"## {TASKS[key].title}", table(columns, rows)]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _ratio(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first subject only")
    parser.add_argument("--task", choices=TASKS, action="append", help="only this one")
    parser.add_argument("--one", nargs=3, metavar=("SUBJECT", "TASK", "WAY"), help="for itself")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.one:
        subject, key, name = options.one
        print(json.dumps(measure(subject, TASKS[key], name)))
        return
    figures: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for key in options.task or TASKS:
        for name in TASKS[key].ways:
            for subject in SUBJECTS[: 1 if options.quick else 2]:
                command = [sys.executable, "-m", __spec__.name, "--one", subject.name, key, name]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:  # The page says so.
                    why = done.stderr.strip().rpartition("\n")[2]
                    row = {"warm": None, "once": None, "found": why[:120].replace("|", "/")}
                else:
                    row = json.loads(done.stdout.strip().rpartition("\n")[2])
                figures.setdefault(key, {}).setdefault(name, {})[subject.name] = row
                print(key, name, subject.name, row, file=sys.stderr, flush=True)
    options.output.write_text(report(figures))


if __name__ == "__main__":
    main()
