"""Time until Amanda is ready: the import, and responses of the command line.

Each command is a process of its own and alternates with one that does nothing, whose time is
subtracted. Writes docs/benchmarks/start.md. `--quick` does fewer rounds.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from .bench_machine import machine, versions

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "start.md"

#: Name -> arguments of Python, and the maximum of elapsed milliseconds beyond Python itself
#: on a machine that is otherwise idle.
COMMANDS: dict[str, tuple[list[str], int]] = {
    "import amanda": (["-c", "import amanda"], 100),
    "amanda --help": (["-m", "amanda", "--help"], 300),
    "amanda tools": (["-m", "amanda", "tools"], 300),
}
NOTHING = ["-c", "pass"]


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Return the elapsed and processor time of one process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-P", *arguments], check=True, stdout=subprocess.DEVNULL)
    elapsed = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 25
    facts = {**machine(), **versions(), "rounds": rounds}
    programs = {"": NOTHING, **{name: arguments for name, (arguments, _) in COMMANDS.items()}}
    for arguments in programs.values():
        seconds(arguments)  # Not timed: the first run reads the files.
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, arguments in programs.items():
            times[name].append(seconds(arguments))
    nothing = 1000 * median(t[0] for t in times[""])
    lines = [
        "# Start-up time",
        "",
        "The start-up time of Amanda and of its commands, in milliseconds beyond a Python that",
        f"does nothing ({nothing:.0f} ms). Each figure is a median of processes of their own. The",
        "bound is for elapsed time on an idle machine. `nox -s bench` writes this page.",
        "",
        "| | elapsed | processor | bound |",
        "|---|---|---|---|",
    ]
    for name, (_, bound) in COMMANDS.items():
        elapsed, processor = (
            1000 * (median(t[i] for t in times[name]) - median(t[i] for t in times[""]))
            for i in (0, 1)
        )
        print(f"{name}: {elapsed:.0f} ms beyond Python, bound {bound} ms", flush=True)
        lines.append(f"| `{name}` | {elapsed:.0f} | {processor:.0f} | {bound} |")
    lines += ["", "| machine and versions | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    OUTPUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
