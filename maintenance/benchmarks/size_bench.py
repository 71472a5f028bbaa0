"""Lines of Python that run for each thing of a program under each tool, as a table in Markdown.

`python -m maintenance.benchmarks.size_bench [--sizes 100 1000] [TOOL ...]` counts the second run of
programs of `tests/seam/test_size.py`, which asserts that the number does not grow with the size.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import amanda

ROOT = Path(__file__).resolve().parents[2]
#: Thing -> the program that has as many of them.
PROGRAMS = {
    "parameter": "parameters_of_a_step",
    "module": "modules_of_a_model",
    "operand": "operands",
    "operator": "operators",
}


def cell(test: Any, program: str, tool: str, sizes: list[int], seconds: float) -> str:
    """Return the lines for each thing at each size, and a dash where they take too long."""
    found, taken = [], 0.0
    for size, before in zip(sizes, [sizes[0], *sizes], strict=False):
        if taken * size / before > seconds:
            found.append("-")
            continue
        start = time.perf_counter()
        run = getattr(test, program)(size)
        run()
        with amanda.apply(test.ALL[tool]()):
            run()
            found.append(f"{test.lines_of(run) / size:,.1f}")
        taken = time.perf_counter() - start
    return " / ".join(found)


def main() -> None:
    """Count under each tool and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--seconds", type=float, default=60, help="leave out what takes longer")
    options = parser.parse_args()
    sys.path += [str(ROOT / "tests" / "seam"), str(ROOT / "tests" / "shared")]
    test = importlib.import_module("test_size")

    print("| tool |", " | ".join(f"lines for each {thing}" for thing in PROGRAMS), "|")
    print("|---|" + "---|" * len(PROGRAMS))
    for tool in options.tools or test.ALL:
        row = (cell(test, p, tool, options.sizes, options.seconds) for p in PROGRAMS.values())
        print(f"| `{tool}` |", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
