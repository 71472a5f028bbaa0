"""Command line of the sweeps: `python -m maintenance.sweeps operators --sample 40 --seed 0`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from . import device
from .results import Part

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "sweep_results"


def main() -> int:
    """Run a part and write its results; return 1 if a difference is unexplained."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.sweeps", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "report"])
    parser.add_argument("--sample", type=int, help="this many cases, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    parser.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts, from 0")
    parser.add_argument("--inputs", type=int, help="at most this many sample inputs for each case")
    parser.add_argument("--shipped", action="store_true", help="under the shipped tools")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, help="begin no case after this time")
    parser.add_argument("--framework", default="torch", help="framework of faults and programs")
    parser.add_argument("--steps", type=int, default=10_000, help="how long the long runs are")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--device", default="cpu", help="where PyTorch's parts make their tensors")
    parser.add_argument("--interceptor", help="PyTorch's: native or function_mode; default: both")
    parser.add_argument("--verbose", action="store_true", help="name each case before it runs")
    options = parser.parse_args()
    if options.shipped and options.part not in SHIPPED_ALONE:
        parser.error(f"--shipped is for {', '.join(SHIPPED_ALONE)}")
    if options.part == "report":
        from .report import write

        return write(options.output)
    device.name = options.device
    if options.interceptor:
        os.environ["AMANDA_SWEEP_INTERCEPTORS"] = options.interceptor
    part = PARTS[options.part](options)
    if options.device != "cpu":
        part.name = f"{part.name}, {options.device}"
    if options.shipped:
        part.name = f"{part.name}, shipped"
    part.options.append(" ".join(_again(sys.argv[1:])))
    shard = options.shard.replace("/", "-of-")
    what: str = f"{options.part}-shipped" if options.shipped else options.part
    if options.part in OF_KIND:
        what = f"{what}-{getattr(options, OF_KIND[options.part])}"
    if options.device != "cpu":
        what = f"{what}-{options.device}"
    if options.sample is not None:
        what = f"{what}-{options.sample}-seed-{options.seed}"
    part.write(options.output / f"{what}-{shard}.json")
    part.counts["comparisons"] = part.cases.total()
    for name, number in sorted(part.counts.items()):
        print(f"{number:>9} {name}")
    for case, figure in part.figures.items():
        print(f"{case}: {figure}")
    for failure in part.unexplained:
        print(f"FAILED {failure.case}: {failure.how} ({failure.times} times): {failure.what}")
    return 1 if part.unexplained else 0


def _again(arguments: list[str]) -> Iterator[str]:
    """Yield the arguments that choose what to run, without those that choose how."""
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--output", "--seconds"):
            next(rest, None)
        elif argument != "--verbose":
            yield shlex.quote(argument)


def _operators(options: argparse.Namespace) -> Part:
    from . import operators

    every = operators.cases()
    total = len(every)
    if options.only:
        every = [case for case in every if options.only in operators.name_of(case)]
    part = operators.sweep(
        operators.chosen(every, options.sample, options.seed, _shard(options)),
        seed=options.seed,
        inputs=options.inputs,
        routines=_routines(options),
        seconds=options.seconds,
        verbose=options.verbose,
    )
    part.totals["operators, each with each dtype"] = total
    return part


def _faults(options: argparse.Namespace) -> Part:
    from . import faults, frameworks

    names = faults.chosen(options.only, options.sample, options.seed)
    framework = frameworks.FRAMEWORKS[options.framework]
    return faults.sweep(framework, names, shipped=options.shipped)


def _models(options: argparse.Namespace) -> Part:
    from . import models

    return models.sweep(
        models.chosen(options.only, options.sample, options.seed, _shard(options)),
        routines=_routines(options),
        seconds=options.seconds,
        verbose=options.verbose,
    )


def _programs(options: argparse.Namespace) -> Part:
    from . import foreign

    framework = options.framework
    names = foreign.chosen(options.only, options.sample, options.seed, framework)
    return foreign.sweep(names, framework=framework, verbose=options.verbose)


def _long(options: argparse.Namespace) -> Part:
    from . import long

    return long.sweep(options.only, options.steps, shipped=options.shipped)


def _random(options: argparse.Namespace) -> Part:
    from . import random_programs

    routines = _routines(options)
    return random_programs.sweep(options.sample or 300, options.seed, options.seconds, routines)


def _exceptions(options: argparse.Namespace) -> Part:
    from . import stale

    return stale.sweep(options.only, options.seed)


def _routines(options: argparse.Namespace) -> tuple[str, ...]:
    from .identity import ROUTINES

    return () if options.shipped else tuple(ROUTINES)


def _shard(options: argparse.Namespace) -> tuple[int, int]:
    index, count = map(int, options.shard.split("/"))
    return index, count


#: Parts that may run under the shipped tools.
SHIPPED_ALONE = ("operators", "models", "random", "long", "faults")
#: Part -> option whose value is part of the name of its results.
OF_KIND = {"faults": "framework", "programs": "framework", "long": "steps"}
PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "operators": _operators,
    "models": _models,
    "programs": _programs,
    "random": _random,
    "long": _long,
    "faults": _faults,
    "exceptions": _exceptions,
}


if __name__ == "__main__":
    sys.exit(main())
