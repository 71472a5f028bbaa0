"""Measure what `fingerprint` costs in training, beside what else records the values of a run.

Prints tables of the processor time of a step in ratio to a plain one, and of the calls of Python
that an operator adds. ``--instructions`` counts instructions of the narrow BERT instead.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import amanda
from amanda_tools.dump import Dump
from amanda_tools.fingerprint import Fingerprint

from .bench_callgrind import count, counted, run
from .bench_models import SUBJECTS, Program
from .bench_report import table
from .bench_timing import Way, interleaved

#: Number of steps before instructions are counted, and while they are.
WARM, COUNTED = 8, 2


class Empty(amanda.Tool):
    """Calls an empty routine wherever `Fingerprint` records something."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Instrument a forward operator."""
        context.insert_before_op(self.empty, observe=True)
        context.insert_after_op(self.empty, observe=True)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Instrument a backward operator."""
        context.insert_before_backward_op(self.empty, observe=True)
        context.insert_after_backward_op(self.empty, observe=True)

    def empty(self, *values: object) -> None:
        """Do nothing."""


TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "empty routines": Empty,
    "fingerprint": Fingerprint,
    "fingerprint:check=1": lambda: Fingerprint(check=1),
    "fingerprint:norms=true": lambda: Fingerprint(norms=True),
    "fingerprint:level=modules": lambda: Fingerprint(level="modules"),
    "fingerprint:level=steps": lambda: Fingerprint(level="steps"),
}


@contextmanager
def _dumped() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        tool = Dump(values=["gradients"], calls=True, everything=True, folder=Path(folder, "d"))
        with amanda.apply(tool):
            yield


@contextmanager
def _debug_mode() -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode(), DebugMode.log_tensor_hashes(hash_inputs=True):
        yield


def extents() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return the context managers in which a step runs, by their names."""
    # One tool for each, applied again and again, so that it analyses only once.
    applied = {name: make() for name, make in TOOLS.items()}
    return {
        "plain": nullcontext,
        **{name: partial(amanda.apply, tool) for name, tool in applied.items()},
        "dump of the same values": _dumped,
        "DebugMode with hashes": _debug_mode,
    }


def calls_of(step: Callable[[], object]) -> int:
    """Return how many functions in Python a step calls."""
    found = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def added_calls(program: Program) -> dict[str, int]:
    """Return how many calls of Python each tool adds to a step, from the third one on."""
    for _ in range(2):
        program()
    plain, found = calls_of(program), {}
    for name, make in TOOLS.items():
        with amanda.apply(make()):
            for _ in range(4):
                program()
            found[name] = calls_of(program) - plain
    return found


def inside(library: Path, names: list[str]) -> None:
    """Count instructions in valgrind."""
    torch.set_num_threads(1)
    program, ways = SUBJECTS[0].program(training=True), extents()
    for name in names:
        counted(library, name, program, ways[name](), WARM, COUNTED)


def main(options: argparse.Namespace) -> None:
    """Measure, and print tables."""
    torch.set_num_threads(1)
    if options.instructions:
        counts = count(__file__, "plain", *(options.only or TOOLS))
        rows = [[name, f"{n / counts['plain']:.3f}"] for name, n in counts.items()]
        print(table(["", SUBJECTS[0].name], rows))
        return
    for subject in SUBJECTS:
        if not subject.name.startswith(tuple(options.subject)):
            continue
        program = subject.program(training=True)
        ways = [
            Way(name, program, enter)
            for name, enter in extents().items()
            if not options.only or name in ("plain", *options.only)
        ]
        found = interleaved(ways, options.seconds)
        calls = added_calls(program)
        rows = [
            [name, f"{one.ratio:.2f}", f"{one.low:.2f} to {one.high:.2f}", str(calls.get(name, ""))]
            for name, one in found.timings.items()
        ]
        rows += [[name, error, "", ""] for name, error in found.failed.items()]
        print(table([subject.name, "ratio", "quartiles", "calls of Python added"], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instructions", action="store_true", help="count instructions")
    parser.add_argument("--only", nargs="+", help="only these, and plain steps")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each subject")
    parser.add_argument("--subject", nargs="+", default=["narrow BERT", "ResNet-50 at 224"])
    if {"--instructions", "--inside"} & set(sys.argv):
        run(parser, inside, main)
    else:
        main(parser.parse_args())
