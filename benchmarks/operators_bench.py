"""Count the instructions that an empty routine costs at one operator of each kind.

Uses `bench_callgrind` for the calls of `operator_kinds`. Writes docs/benchmarks/operators.md.
Without valgrind or a C compiler it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import amanda
from bench_callgrind import Short, count, missing
from bench_machine import machine, versions
from bench_report import table
from operator_kinds import KINDS, Kind, Repeated

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "operators.md"

#: Calls in one run; runs before counting, and while counting.
CALLS, WARM, COUNTED = 4, 6, 2
#: Instructions that take about a microsecond.
MICROSECOND = 4600

FORWARD, STEP = "forward", "step"
FIRST = "first execution"
#: Column -> what is run, whether gradients are recorded, and how the routine is inserted.
COLUMNS: dict[str, tuple[str, bool, str]] = {
    "before": (FORWARD, False, "before"),
    "after": (FORWARD, False, "after"),
    "before, gradients recorded": (FORWARD, True, "before"),
    "after, gradients recorded": (FORWARD, True, "after"),
    "gradients of outputs": (STEP, True, "arriving"),
    "gradients of inputs": (STEP, True, "leaving"),
    "before backward op": (STEP, True, "raw before"),
    "after backward op": (STEP, True, "raw after"),
}

INTRODUCTION = """\
# What an empty routine costs at one operator

`nox -s bench` writes this page. The figures are instructions for one operator, counted by
Valgrind's callgrind on one thread from the {warm}th run with the tool on, beyond those of a tool
that inserts nothing ([instructions.md](instructions.md) has its costs). About {micro:,} of them
take a microsecond. Budgets: a microsecond before and after an operator, two for each gradient, and
{first:,} (60 microseconds) for an operator's first execution, in which it is analysed.

- A dash: the operator has no gradient, or does not record one.
- Routines that edit cost what they compute, and the check of what they return.
- Routines for gradients are called once for an operator that has one backward operator. For
  `before` and `after backward op` there is one call for each backward operator, of which `linear`
  on a batch has three.
"""


def empty(*values: object) -> None:
    """Do nothing."""


class One(amanda.Tool):
    """Inserts an empty routine at the operators of one type."""

    def __init__(self, op_type: str, place: str) -> None:
        super().__init__()
        self.op_type, self.place = op_type, place
        self.add_inst_for_op(self.select)
        if place.startswith("raw"):
            self.add_inst_for_op(self.select_backward, backward=True)

    def select(self, context: amanda.OpContext) -> None:
        """Instrument a forward operator."""
        if context.op_type != self.op_type:
            return
        if self.place == "before":
            context.insert_before_op(empty)
        elif self.place == "after":
            context.insert_after_op(empty)
        elif self.place == "arriving":
            context.insert_before_backward_op(empty)
        elif self.place == "leaving":
            context.insert_after_backward_op(empty)

    def select_backward(self, context: amanda.OpContext) -> None:
        """Instrument a backward operator."""
        if context.get_op().__name__ != self.op_type:
            return
        if self.place == "raw before":
            context.insert_before_backward_op(empty)
        else:
            context.insert_after_backward_op(empty)


def main() -> None:
    """Count and write the table; inside valgrind, only count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it is short")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        run_inside(options.inside)
        return
    absent = missing()
    if absent:
        print(f"No instructions are counted: no {' and no '.join(absent)}.", file=sys.stderr)
        return
    OUTPUT.write_text(report(costs(count(__file__))))
    print(f"Written to {OUTPUT}", file=sys.stderr)


def run_inside(library: Path) -> None:
    """Run every kind in every way, and tell callgrind which part to count."""
    torch.set_num_threads(1)
    short = Short(library)
    gc.disable()
    for name, kind in KINDS.items():
        print(name, file=sys.stderr, flush=True)
        for part, grad, where in dict.fromkeys(map(baseline, COLUMNS.values())):
            idle = amanda.apply(One("", where))
            repeat(short, kind, f"{name}; {part}; {grad}; {where}", part, grad, idle)
        repeat(short, kind, f"{name}; plain", FORWARD, False, nullcontext())
        for column, (part, grad, where) in COLUMNS.items():
            tool = amanda.apply(One(kind.op_type, where))
            repeat(short, kind, f"{name}; {column}", part, grad, tool)
        gc.collect()


def baseline(column: tuple[str, bool, str]) -> tuple[str, bool, str]:
    """Return the run with which a column is compared: of a tool with the same analysis routines."""
    part, grad, where = column
    return part, grad, "raw before" if where.startswith("raw") else "before"


def repeat(
    short: Short,
    kind: Kind,
    name: str,
    part: str,
    grad: bool,
    extent: AbstractContextManager[object],
) -> None:
    """Count the first and the later runs of one kind in one way."""
    repeated = Repeated(kind, CALLS)
    step = forward if part == FORWARD else train
    with torch.set_grad_enabled(grad), extent:
        for number in range(WARM):
            run = prepared(repeated, step)
            if number:
                run()
            else:
                with short.count(f"{name}; {FIRST}"):
                    run()
        for number in range(COUNTED):
            run = prepared(repeated, step)
            with short.count(f"{name}; run {number}"):
                run()


def prepared(repeated: Repeated, step: Callable[[Repeated], object]) -> Callable[[], object]:
    """Return one run, whose inputs are made."""
    with amanda.disabled():
        repeated.prepare()
    return lambda: step(repeated)


def forward(repeated: Repeated) -> Any:
    """Run the calls."""
    return repeated()


def train(repeated: Repeated) -> None:
    """Run the calls and their backward."""
    results = repeated.differentiable(repeated())
    if repeated.gradients is None:
        with amanda.disabled():
            repeated.gradients = [torch.ones_like(result) for result in results]
    if results:
        torch.autograd.backward(results, repeated.gradients)


def costs(counts: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the instructions of one operator by kind and column."""
    found: dict[str, dict[str, int]] = {}
    for name in KINDS:
        row = found[name] = {}
        step, forward = (later(counts, f"{name}; {part}; True; before") for part in (STEP, FORWARD))
        for column, way in COLUMNS.items():
            if way[0] == STEP and step < 1.02 * forward:
                continue
            idle = later(counts, "; ".join(map(str, (name, *baseline(way)))))
            row[column] = round((later(counts, f"{name}; {column}") - idle) / CALLS)
        first = f"{name}; before; {FIRST}", f"{name}; plain; {FIRST}"
        row[FIRST] = round((counts[first[0]] - counts[first[1]]) / CALLS)
    return found


def later(counts: dict[str, int], name: str) -> float:
    """Return the instructions of a later run."""
    return sum(counts[f"{name}; run {number}"] for number in range(COUNTED)) / COUNTED


def report(found: dict[str, dict[str, int]]) -> str:
    """Return the page."""
    facts = {**machine(), **versions()}
    columns = [*COLUMNS, FIRST]
    rows = [
        [name, *(f"{row[column]:,}" if column in row else "—" for column in columns)]
        for name, row in found.items()
    ]
    introduction = INTRODUCTION.format(warm=WARM + 1, micro=MICROSECOND, first=60 * MICROSECOND)
    parts = [
        introduction,
        table(["machine and versions", ""], [[k, str(v)] for k, v in facts.items()]),
        table(["call", *columns], rows),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


if __name__ == "__main__":
    main()
