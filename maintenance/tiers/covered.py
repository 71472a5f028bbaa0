"""Report which lines and branches of each package the tests ran: `nox -s coverage`.

`python -m maintenance.tiers.covered DATA --tier fast` reads coverage.py's data file and exits with
1 if a package is below its bound. Code in C and C++ is not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import coverage

#: Least percentage of lines by tier and package.
BOUNDS = {
    "fast": {
        "amanda_core": 90,
        "amanda_tools": 90,
        "amanda_driver_onnxruntime": 80,
        "amanda_driver_tf": 80,
        "amanda_driver_torch": 80,
    },
    "all": {
        "amanda_core": 95,
        "amanda_tools": 95,
        "amanda_driver_onnxruntime": 90,
        "amanda_driver_tf": 90,
        "amanda_driver_torch": 90,
    },
}
CONFIGURATION = Path(__file__).with_name("coverage.toml")


def main() -> int:
    """Print a table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tier", choices=BOUNDS, required=True)
    parser.add_argument("--worst", type=int, default=12, help="how many modules to name")
    options = parser.parse_args()
    measured = coverage.Coverage(data_file=options.data, config_file=str(CONFIGURATION))
    measured.load()
    lines: Counter[str] = Counter()
    run: Counter[str] = Counter()
    branches: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    modules = []
    for file in measured.get_data().measured_files():
        package = package_of(Path(file))
        numbers = measured._analyze(file).numbers
        lines[package] += numbers.n_statements
        run[package] += numbers.n_executed
        branches[package] += numbers.n_branches
        taken[package] += numbers.n_executed_branches
        modules.append((numbers.n_missing, numbers.n_statements, file))
    below = []
    for package, bound in BOUNDS[options.tier].items():
        covered = 100 * run[package] / max(lines[package], 1)
        if covered < bound:
            below.append(package)
        print(
            f"{package:22} {run[package]:6} of {lines[package]:6} lines {covered:5.1f}%"
            + f" (at least {bound}%)"
            + f"   {taken[package]:6} of {branches[package]:6} branches"
            + f" {100 * taken[package] / max(branches[package], 1):5.1f}%"
        )
    print("\nMost lines that no test ran:")
    for missing, statements, file in sorted(modules, reverse=True)[: options.worst]:
        print(f"{missing:5} of {statements:5}  {file}")
    for package in below:
        print(f"{package} is below its bound.", file=sys.stderr)
    return bool(below)


def package_of(path: Path) -> str:
    """Return the package that a module belongs to; `amanda` is part of the core."""
    packages = [part for part in path.parts[:-1] if part.startswith("amanda")]
    return "amanda_core" if packages[-1] == "amanda" else packages[-1]


if __name__ == "__main__":
    sys.exit(main())
