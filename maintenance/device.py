"""Check on a machine with a CUDA device what other machines cannot, in at most six minutes.

`python -m maintenance.device` runs the parts one after the other, and prints the figures of each as
it ends. It needs the distributions, pytest and transformers; without a device it says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import amanda
import amanda_driver_torch
from maintenance.benchmarks.bench_models import SUBJECTS, Subject
from maintenance.benchmarks.bench_timing import Way, interleaved

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
#: Tests that are skipped without a device, and those that stand for one elsewhere.
TESTS = (
    "tests/tools/latency/test_latency.py",
    "tests/tools/memory/test_memory.py",
    "amanda_driver_torch/tests/test_device_graphs.py",
)
KIT = "tests/seam/conformance/test_torch.py"
#: Seconds for each model.
PATIENCE = 25


class Count(amanda.Tool):
    """Counts the executions of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.add_inst_for_op(lambda context: context.insert_before_op(self.count, inputs=[]))

    def count(self, *_: object) -> None:
        """Count an execution."""
        self.calls += 1


def idle() -> amanda.Tool:
    """Return a tool with all four analysis routines that inserts nothing."""
    tool = amanda.Tool()
    for backward in (False, True):
        for outputs in (False, True):
            tool.add_inst_for_op(lambda context: None, backward, outputs)
    return tool


@contextmanager
def part(title: str) -> Iterator[None]:
    """Print the title of a part, and how long it took."""
    print(f"== {title}", flush=True)
    start = time.perf_counter()
    yield
    print(f"   {time.perf_counter() - start:.0f} s", flush=True)


def ratios(subject: Subject, training: bool) -> None:
    """Print the elapsed times of a model on the device, under tools over plain."""
    program = subject.program(training)
    program.model.cuda()
    program.batch = program.batch.cuda()

    def run() -> None:
        program()
        torch.cuda.synchronize()

    tools = {"nothing inserted": idle(), "every operator counted": Count()}
    ways = [Way("plain", run)]
    ways += [Way(name, run, partial(amanda.apply, tool)) for name, tool in tools.items()]
    timings = interleaved(ways, PATIENCE).timings
    plain = timings["plain"].wall
    found = "; ".join(f"{name} {timings[name].wall / plain:.3f}" for name in tools)
    print(f"   {subject.name}: plain {1000 * plain:.3f} ms; {found}", flush=True)


def tests(*arguments: str, **settings: str) -> None:
    """Run tests, and print how they ended."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": "1", **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    print(*(f"   {line[:200]}" for line in [*told[:20], *lines[-1:]]), sep="\n", flush=True)


def main() -> None:
    """Run all parts."""
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device: nothing was checked")
    print(torch.cuda.get_device_name(), torch.__version__, amanda_driver_torch.interceptor())
    for training in (False, True):
        with part("training step" if training else "forward pass"):
            for subject in SUBJECTS[:2]:
                ratios(subject, training)
    with part("tests that need a device"):
        tests("-k", "cuda or device", *TESTS)
    with part("conformance kit with tensors on the device"):
        tests(KIT, "-k", "Native", AMANDA_TEST_DEVICE="cuda")


if __name__ == "__main__":
    main()
