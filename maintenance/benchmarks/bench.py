"""Measure the cost of instrumentation against plain torch and against the alternatives.

Run it with `nox -s bench`, in about 20 minutes, or `nox -s bench -- --quick`, in about two. It
writes results.json, README.md and results.png into docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

import amanda

from .bench_apply import after_leaving, entering
from .bench_growth import PLAIN, caching, operators, tools
from .bench_machine import machine, versions
from .bench_memory import memory
from .bench_models import SUBJECTS, Program, Subject
from .bench_peers import peers
from .bench_report import write_json, write_markdown
from .bench_results import Results
from .bench_timing import Comparison, Way, interleaved
from .bench_tools import INTERCEPTORS, ways

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@dataclass(frozen=True)
class Extent:
    """How much is measured; times are in seconds."""

    program: float
    growth: float
    caching: float
    lengths: list[int]
    tools: list[int]
    iterations: int
    rounds: int


FULL = Extent(75, 20, 60, [100, 1_000, 10_000, 100_000], [1, 2, 5, 10, 20], 10_000, 100)
QUICK = Extent(9, 3, 7, [100, 1_000, 10_000], [1, 5, 20], 1_000, 20)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer models, fewer rounds")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder for the results")
    options = parser.parse_args()
    # With several threads, times depend on what else the machine is doing.
    torch.set_num_threads(1)
    # The peers warn about names of submodules, inputs without gradients, and so on.
    warnings.simplefilter("ignore")
    results = measure(options.quick)
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(results, options.output / "results.json")
    write_markdown(results, options.output / "README.md")
    try:
        from .bench_plot import draw
    except ImportError as error:
        progress(f"No figure: {error}")
    else:
        draw(results, options.output / "results.png")
    progress(f"Written to {options.output}")


def measure(quick: bool) -> Results:
    """Measure everything."""
    start = time.perf_counter()
    extent = QUICK if quick else FULL
    results = Results("quick" if quick else "full", machine(), versions())
    narrow, residual = SUBJECTS[:2]
    # First, before anything has been applied in this process.
    progress("After `apply` ...")
    for training in (False, True):
        results.after[name_of(training)] = after_leaving(narrow, training, extent.rounds)
    progress("Entering and leaving `apply` ...")
    for name in INTERCEPTORS:
        try:
            results.entering[name] = entering(name, 200)
        except amanda.AmandaError as error:
            results.missing[name] = str(error).splitlines()[0]
    interceptors = list(results.entering)
    # Exclude the objects that exist now, so that collecting between turns is quick.
    gc.collect()
    gc.freeze()
    for subject in SUBJECTS:
        if quick and not subject.quick:
            continue
        for training in (False, True):
            progress(f"{subject.name}, {name_of(training)} ...")
            compared = compare(subject, training, interceptors, extent.program)
            results.programs.setdefault(subject.name, {})[name_of(training)] = compared
    progress("The number of operators ...")
    results.operators = operators(interceptors, extent.lengths, extent.growth)
    progress("The number of tools ...")
    results.tools = tools(narrow, interceptors, extent.tools, extent.caching)
    for subject in (narrow, residual):
        progress(f"Cached and uncached, {subject.name} ...")
        results.caching[subject.name] = caching(subject, interceptors, extent.caching)
    progress("Memory ...")
    results.memory = memory(interceptors, extent.iterations)
    results.seconds = time.perf_counter() - start
    return results


def compare(
    subject: Subject,
    training: bool,
    interceptors: list[str],
    seconds: float,
    *,
    with_peers: bool = True,
    program: Program | None = None,
) -> Comparison:
    """Measure one program in all ways: plain, with Amanda's interceptors, and with the peers.

    Args:
        subject: The model.
        training: Measure a training step instead of a forward pass.
        interceptors: Names of the interceptors to measure.
        seconds: Time for all ways together.
        with_peers: Measure the peers as well.
        program: Program to run instead of the subject's own.
    """
    program = program or subject.program(training)
    # Plain torch twice: the difference is the noise.
    measured = [Way(PLAIN, program), Way(f"{PLAIN}, again", program)]
    for name in interceptors:
        measured += ways(name, program, subject.counted)
    others, missing = peers(program) if with_peers else ([], {})
    compared = interleaved([*measured, *others], seconds)
    return Comparison(compared.timings, compared.failed | missing)


def name_of(training: bool) -> str:
    """Return the name of a kind of run."""
    return "training step" if training else "forward"


def progress(message: str) -> None:
    """Print progress to stderr."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
