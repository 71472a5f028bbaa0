"""Check on a machine with a CUDA device what other machines cannot, in at most six minutes.

`python -m maintenance.device` runs the parts one after the other, and prints the figures of each as
it ends. A part that would begin too late is named and left out. It needs the distributions, pytest
and transformers. Without a device it says so; with `--dry` the parts run on the processor for a
short time, which checks this program alone.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.nn import ModuleList

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
#: Seconds for each model, and in all.
PATIENCE, LIMIT = 25.0, 360.0
#: Seconds that are kept for the parts that run tests.
TESTING = 150.0
#: Modes of `torch.compile`, after eager execution, and the layers of a transformer that it gets.
MODES, LAYERS = ("", "default", "reduce-overhead"), 2


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
    """Print the title of a part, and how long it took, or why it did not run to its end."""
    print(f"== {title}", flush=True)
    start = time.perf_counter()
    try:
        yield
    except Exception as error:  # The other parts have figures of their own.
        print(f"   FAILED: {type(error).__name__}: {error}".splitlines()[0][:200])
    print(f"   {time.perf_counter() - start:.0f} s", flush=True)


def ratios(subject: Subject, training: bool, mode: str, device: str, seconds: float) -> None:
    """Print the elapsed times of a model on the device, under tools over plain.

    Args:
        subject: The model.
        training: Whether a training step is timed, or a forward pass.
        mode: That of `torch.compile`; empty for eager execution.
        device: The device.
        seconds: Time for all ways.
    """
    program = subject.program(training)
    # A compiler takes minutes for all layers.
    if mode and isinstance(layers := getattr(program.model.encoder, "layer", None), ModuleList):
        del layers[LAYERS:]
    program.model.to(device)
    program.batch = program.batch.to(device)
    if mode:
        program.model.compile(mode=mode)

    def run() -> None:
        program()
        if device == "cuda":
            torch.cuda.synchronize()

    tools = {"nothing inserted": idle(), "every operator counted": Count()}
    ways = [Way("plain", run)]
    ways += [Way(name, run, partial(amanda.apply, tool)) for name, tool in tools.items()]
    comparison = interleaved(ways, seconds)
    timings, plain = comparison.timings, comparison.timings["plain"].wall
    found = "; ".join(f"{name} {timings[name].wall / plain:.3f}" for name in tools)
    print(f"   plain {1000 * plain:.3f} ms; {found}", flush=True)


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
    is_dry = not torch.cuda.is_available()
    if is_dry and "--dry" not in sys.argv[1:]:
        raise SystemExit("There is no CUDA device: nothing was checked. --dry runs this on a CPU")
    device, seconds = ("cpu", 1.0) if is_dry else ("cuda", PATIENCE)
    name = "no device, a processor" if is_dry else torch.cuda.get_device_name()
    status = str(amanda_driver_torch.interceptor()).splitlines()[0]
    print(name, torch.__version__, status, flush=True)
    start, left_out = time.perf_counter(), []
    subjects = SUBJECTS[:1] if is_dry else SUBJECTS[:2]
    for mode, training, subject in itertools.product(MODES, (False, True), subjects):
        how = f"{mode}, of {LAYERS} layers" if mode else "eager"
        title = f"{subject.name}, {'training' if training else 'forward'}, {how}"
        if time.perf_counter() - start > LIMIT - TESTING - seconds:
            left_out.append(title)
            continue
        with part(title):
            ratios(subject, training, mode, device, seconds)
    with part("tests that need a device"):
        tests("-k", "cuda or device", *TESTS)
    with part("conformance kit with tensors on the device"):
        tests(KIT, "-k", "Native", AMANDA_TEST_DEVICE=device)
    for title in left_out:
        print(f"== {title}: not run, since there was no time left")


if __name__ == "__main__":
    main()
