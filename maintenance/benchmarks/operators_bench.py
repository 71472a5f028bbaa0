"""Count the instructions that an empty routine costs at one operator of each kind.

Uses `bench_callgrind` for the calls of `operator_kinds`. Writes docs/benchmarks/operators.md and
operators.json, from which `--missing` and `--only` continue. Without valgrind or a C compiler it
says so and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import amanda

from .bench_callgrind import Switch, count, run
from .bench_machine import machine, versions
from .bench_report import table
from .operator_kinds import KINDS, Repeated

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "operators.md"
FIGURES = OUTPUT.with_suffix(".json")

#: Kinds that are counted in one process.
PART = 33

#: Calls in one run; runs before counting, and while counting.
CALLS, WARM, COUNTED = 4, 6, 2
#: Instructions that take about a microsecond.
MICROSECOND = 4600

FORWARD, STEP = "forward", "step"
#: The first execution, and that of an operator whose second input gets a mask: the routine passes a
#: tensor for it, so that the core looks whether the weight there may be another one each time.
FIRST, MASKED = "first execution", "first execution, with a mask"
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
- PyTorch's own hooks cost about 16,500 for a node (`register_prehook` with an empty function) and
  26,000 for a tensor (`register_hook`), counted in the same way for `relu`. Routines for gradients
  are called by hooks in C. Of their cost, torch takes about 1,000 to take the GIL around each hook,
  and 2,300 for the Python object of each gradient (2,000 of them to free it, with the GIL once
  more). A gradient that is reshaped or transposed for a routine is a view more, for 3,000 to 4,000.
- The gradients of inputs of `einsum` are reshaped and permuted. `[tensor]` indexes twice.
- The first execution includes a share of what each new module costs, which grows with their number,
  and what is found once for each function. It makes the context, its name, the tool's actions and
  the plan in Python. {within} of {kinds} kinds are within the budget.
- With a mask, the routine gets the second input, and a tensor as its argument. An operator that has
  no tensor there is analysed and gets no routine. It is counted after the other one, so what is
  found once for each function is known.
- Routines that edit cost what they compute, and the check of what they return.
- Routines for gradients are called once for an operator that has one backward operator. For
  `before` and `after backward op` there is one call for each backward operator, of which `linear`
  on a batch has three.
"""


MASK = torch.ones(1)


def empty(*values: object, mask: object = None) -> None:
    """Do nothing."""


def has_second_tensor(context: amanda.OpContext) -> bool:
    """Return True if an operator has a tensor, such as a weight, as its second input."""
    return isinstance((*context.get_inputs(), None, None)[1], torch.Tensor)


class One(amanda.Tool):
    """Inserts an empty routine at the operators of one type."""

    #: The type; set before the operator is analysed.
    op_type = ""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
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
        elif has_second_tensor(context):
            context.insert_before_op(empty, inputs=[1], mask=MASK)

    def select_backward(self, context: amanda.OpContext) -> None:
        """Instrument a backward operator."""
        if context.forward is None or context.forward.op_type != self.op_type:
            return
        if self.place == "raw before":
            context.insert_before_backward_op(empty)
        else:
            context.insert_after_backward_op(empty)


def main() -> None:
    """Count and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only the first {PART} kinds")
    parser.add_argument("--missing", action="store_true", help="keep the kinds counted so far")
    parser.add_argument("--only", nargs="+", choices=KINDS, help="count these, keep the others")
    run(parser, run_inside, write)


def write(options: argparse.Namespace) -> None:
    """Count in valgrind, some kinds in each process, and write the table after each."""
    found: dict[str, dict[str, int]] = {}
    if (options.missing or options.only) and FIGURES.exists():
        found = json.loads(FIGURES.read_text())
    names = options.only or [name for name in KINDS if name not in found]
    for start in range(0, PART if options.quick else len(names), PART):
        part = names[start : start + PART]
        found |= costs(part, count(__file__, *part))
        found = {name: found[name] for name in KINDS if name in found}
        FIGURES.write_text(json.dumps(found, indent=1) + "\n")
        OUTPUT.write_text(report(found))
        print(f"Written to {OUTPUT}: {len(found)} of {len(KINDS)} kinds", file=sys.stderr)


def run_inside(library: Path, names: list[str]) -> None:
    """Run these kinds in every way, and tell callgrind which part to count."""
    torch.set_num_threads(1)
    gc.disable()
    switch = Switch(library)
    baselines = dict.fromkeys(map(baseline, COLUMNS.values()))
    for way, (part, grad, where) in {str(idle): idle for idle in baselines}.items():
        repeat(switch, names, way, part, grad, One(where), "")
    for column, (part, grad, where) in COLUMNS.items():
        repeat(switch, names, column, part, grad, One(where))
    first = [Repeated(KINDS[name], CALLS) for name in names]
    with torch.no_grad(), switch.counting():
        for way, tool in (("plain", None), (FIRST, One("before")), (MASKED, One("mask"))):
            with nullcontext() if tool is None else amanda.apply(tool):
                for name, repeated in zip(names, first, strict=True):
                    One.op_type = repeated.kind.op_type
                    once = prepared(repeated, forward)
                    with switch.count(f"{name}; {way}; first"):
                        once()


def baseline(column: tuple[str, bool, str]) -> tuple[str, bool, str]:
    """Return the run with which a column is compared: of a tool with the same analysis routines."""
    part, grad, where = column
    return part, grad, "raw before" if where.startswith("raw") else "before"


def repeat(
    switch: Switch,
    names: list[str],
    way: str,
    part: str,
    grad: bool,
    tool: One,
    op_type: str | None = None,
) -> None:
    """Count the later runs of all kinds in one way.

    All are warm before any is counted, since valgrind translates the program again whenever the
    counting begins.
    """
    print(way, file=sys.stderr, flush=True)
    step = forward if part == FORWARD else train
    several = [Repeated(KINDS[name], CALLS) for name in names]
    with torch.set_grad_enabled(grad), amanda.apply(tool):
        for repeated in several:
            One.op_type = repeated.kind.op_type if op_type is None else op_type
            for _ in range(WARM):
                prepared(repeated, step)()
        with switch.counting():
            for name, repeated in zip(names, several, strict=True):
                for number in range(COUNTED):
                    once = prepared(repeated, step)
                    with switch.count(f"{name}; {way}; run {number}"):
                        once()
    gc.collect()


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


def costs(names: list[str], counts: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the instructions of one operator by kind and column."""
    found: dict[str, dict[str, int]] = {}
    for name in names:
        row = found[name] = {}
        step, forward = (later(counts, f"{name}; {(p, True, 'before')}") for p in (STEP, FORWARD))
        for column, way in COLUMNS.items():
            if way[0] == STEP and step < 1.02 * forward:
                continue
            idle = later(counts, f"{name}; {baseline(way)}")
            row[column] = round((later(counts, f"{name}; {column}") - idle) / CALLS)
        plain = counts[f"{name}; plain; first"]
        for column in (FIRST, MASKED):
            row[column] = round((counts[f"{name}; {column}; first"] - plain) / CALLS)
    return found


def later(counts: dict[str, int], name: str) -> float:
    """Return the instructions of a later run."""
    return sum(counts[f"{name}; run {number}"] for number in range(COUNTED)) / COUNTED


def report(found: dict[str, dict[str, int]]) -> str:
    """Return the page."""
    facts = {**machine(), **versions()}
    columns = [*COLUMNS, FIRST, MASKED]
    rows = [
        [name, *(f"{row[column]:,}" if column in row else "—" for column in columns)]
        for name, row in found.items()
    ]
    medians = (statistics.median(row[c] for row in found.values() if c in row) for c in columns)
    rows.append(["median", *(f"{median:,.0f}" for median in medians)])
    budget = 60 * MICROSECOND
    introduction = INTRODUCTION.format(
        warm=WARM + 1,
        micro=MICROSECOND,
        first=budget,
        within=sum(found[name][FIRST] <= budget for name in found),
        kinds=len(found),
    )
    parts = [
        introduction,
        table(["machine and versions", ""], [[k, str(v)] for k, v in facts.items()]),
        table(["call", *columns], rows),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


if __name__ == "__main__":
    main()
