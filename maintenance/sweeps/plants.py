"""Errors of one unit in the last place, planted in training on two processes, and where `amanda
diff` says that they are.

`python -m maintenance.sweeps.plants --page maintenance/sweeps/plants.md` writes that page. A small
GPT is trained plainly, with workers that load data, in mixed precision, with checkpoints, with
memory that is read before it is written, and compiled. Equal runs must be equal, and of the others
operator, line, step and rank must be named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from amanda_tools.diff import compare_fingerprints

__all__ = ["COMPILED", "EAGER", "PHASES", "Outcome", "is_named", "run"]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/shared/planting.py"
EAGER = ("plain", "loader", "autocast", "checkpoint", "empty")
#: A compiled training is recorded without gradients, and with them in a run of its own.
COMPILED = (("compiled", "forward"), ("compiled", "backward"))
PHASES = ("forward", "backward", "optimizer", "collective")


@dataclass
class Outcome:
    """What was planted and what was named.

    Attributes:
        kinds: How many errors were planted of each kind of training and phase.
        pairs: How many pairs of equal runs of each kind were compared.
        missed: What was planted and not named, with what was said instead.
        alarms: Pairs of equal runs in which a difference was named.
    """

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)


def _trial(name: str, kind: str, phase: str, rank: int = -1, draw: float = 0.0) -> dict[str, Any]:
    return {"name": name, "kind": kind, "rank": rank, "phase": phase, "draw": draw}


def _plans(eager: int, compiled: int, pairs: int, seed: int) -> list[list[dict[str, Any]]]:
    """Return the trainings of two launches: those that are compared with, and the others."""
    chosen = random.Random(seed)
    every = [*((kind, "forward") for kind in EAGER[: eager + pairs]), *COMPILED]
    planted = [
        *((chosen.choice(EAGER), PHASES[number % 4]) for number in range(eager)),
        *(("compiled", PHASES[number % 4]) for number in range(compiled)),
    ]
    needed = {(kind, _counterpart(kind, phase)) for kind, phase in planted}
    again = [every[number % len(every)] for number in range(pairs)]
    plain = [one for one in every if one in needed or one in again]
    first = [_trial(f"{kind} {phase}", kind, phase) for kind, phase in plain]
    # Only a run of the same launch says how many executions there are.
    again = [*(one for one in plain if one not in again), *again]
    second = [
        _trial(f"again {number}: {kind} {phase}", kind, phase)
        for number, (kind, phase) in enumerate(again)
    ]
    second += [
        _trial(f"{number}: {kind} {phase}", kind, phase, chosen.randrange(2), chosen.random())
        for number, (kind, phase) in enumerate(planted)
    ]
    return [first, second]


def _counterpart(kind: str, phase: str) -> str:
    return "backward" if (kind, phase) == ("compiled", "backward") else "forward"


def run(eager: int, compiled: int, pairs: int = 0, seed: int = 0, seconds: float = 600) -> Outcome:
    """Plant errors and compare.

    Args:
        eager: How many errors to plant in eager trainings.
        compiled: The same for compiled ones.
        pairs: How many pairs of equal runs to compare at least.
        seed: What is planted follows from it.
        seconds: How long one of two launches may take.

    Raises:
        TimeoutExpired: A process did not end.
        RuntimeError: A process failed.
    """
    with tempfile.TemporaryDirectory() as name:
        plans = _plans(eager, compiled, pairs, seed)
        for number, plan in enumerate(plans):
            _launch(Path(name) / str(number), plan, seconds)
        return _judge(Path(name), plans[1])


def _launch(folder: Path, plan: list[dict[str, Any]], seconds: float) -> None:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    paths = os.pathsep.join(str(path) for path in ROOT.glob("*/src"))
    command = [sys.executable, str(PROGRAM), str(folder)]
    started = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder / "plan.json")],
            env={**os.environ, "PYTHONPATH": paths},
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            if process.wait(seconds):
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    finally:
        for process in started:
            process.kill()


def _judge(folder: Path, trials: list[dict[str, Any]]) -> Outcome:
    outcome = Outcome()
    for trial in trials:
        plain = folder / "0" / f"{trial['kind']} {_counterpart(trial['kind'], trial['phase'])}"
        part = folder / "1" / trial["name"]
        found = compare_fingerprints(plain, part)
        if trial["rank"] < 0:
            outcome.pairs[trial["kind"]] += 1
            if not (found.same and found.complete):
                outcome.alarms.append(f"{trial['name']}: {found.conclusion()}")
            continue
        outcome.kinds[trial["kind"], trial["phase"]] += 1
        planted = json.loads((part / "planted.json").read_text())
        if found.first is None or not is_named(planted, asdict(found.first)):
            outcome.missed.append(f"{trial['name']}: {planted}: {found.conclusion()}")
    return outcome


def is_named(planted: dict[str, Any], named: dict[str, Any]) -> bool:
    """Return True if the difference is said to be where it was planted.

    Errors in what a collective wrote are planted after it has returned, so that no operator makes
    them: the one that reads them first must be said to read what something else has written.
    """
    same = all(named[name] == value for name, value in planted.items() if name != "phase")
    if planted["phase"] == "collective":
        return same and named["cause"] in ("outside", "writer")
    return same and named["phase"] == planted["phase"] and named["cause"] == "operator"


def _page(outcome: Outcome, seed: int) -> str:
    kinds = [*EAGER, "compiled"]
    planted = sum(outcome.kinds.values())
    lines = [
        "# Planted errors that `amanda diff` names",
        "",
        f"Written by `python -m maintenance.sweeps.plants`, with seed {seed}: training of a small "
        "GPT on two processes with gloo. One element of what one execution writes is wrong by one "
        "unit in the last place. The operator, its line, the step and the rank have to be named. "
        "Errors in what a collective wrote are planted after it has returned, so that no operator "
        "makes them: the operator that reads them first has to be named, as reading what something "
        "else has written, with its line, the step and the rank. Compiled training stays compiled.",
        "",
        f"{planted - len(outcome.missed)} of {planted} errors were named. "
        f"{len(outcome.alarms)} of {sum(outcome.pairs.values())} pairs of equal runs, started "
        "apart, were said to differ.",
        "",
        "| training | " + " | ".join(PHASES) + " | equal pairs |",
        "|---" * 6 + "|",
        *(
            f"| {kind} | "
            + " | ".join(str(outcome.kinds[kind, phase]) for phase in PHASES)
            + f" | {outcome.pairs[kind]} |"
            for kind in kinds
        ),
    ]
    lines += ["", *(f"- {text.splitlines()[0]}" for text in outcome.missed + outcome.alarms)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run the sweep; return 1 if something was missed, or an equal run was said to differ."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.sweeps.plants")
    parser.add_argument("--eager", type=int, default=50)
    parser.add_argument("--compiled", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    outcome = run(options.eager, options.compiled, options.pairs, options.seed, 7200)
    for text in [*outcome.missed, *outcome.alarms]:
        print(text)
    named = sum(outcome.kinds.values()) - len(outcome.missed)
    print(f"{named} of {sum(outcome.kinds.values())} named, {len(outcome.alarms)} alarms")
    if options.page:
        options.page.write_text(_page(outcome, options.seed))
    return bool(outcome.missed or outcome.alarms)


if __name__ == "__main__":
    raise SystemExit(main())
