"""Write docs/backends.md, and its first table in the README, of the results of all environments.

Each environment has two files in tests/backends/results: NAME.json, which one_tool.py makes, and
NAME.kit.json, a summary of the conformance kit's report, which `pages.py NAME REPORT...` makes.
`nox -s backends` runs all of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda_core.testing.source_lines import lines_of_package

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs/backends.md"
README = ROOT / "README.md"
#: What stands before and behind the table in the README.
BEGIN, END = "<!-- tests/backends/pages.py -->\n", "<!-- end -->\n"
TOOLS = ("count", "prune", "edit gradients", "replace", "trace")
#: Driver -> its folder.
DRIVERS = {
    "pytorch": "amanda_driver_torch",
    "tensorflow": "amanda_driver_tf",
    "jax": "amanda_driver_jax",
    "mxnet": "amanda_driver_mxnet",
}

TEXT = """\
# Backends

This page is made of results by `nox -s backends`.

## One tool, every backend

[One file of tools](../tests/portable/tools.py) runs unchanged on each backend, forward and
backward. A perceptron is computed twice under each tool, with routines on the host and with staged
ones, and once after it. *As by hand*: the output and the gradients are those of the same
computation with the edit written into it, the routines ran as often as their operators, and the
results afterwards are the plain ones.

{tools}

## What a new driver costs

A driver makes a framework speak the language of the tools. These are the costs of ours. Lines of
Python are those without comments, docstrings and blank lines. A test of the
[conformance kit](conformance.md) is left out if the driver does not declare its capability, or if
the framework lacks its program; the kit's report says which. No file of the core was changed for
one backend, and none names a framework. One method was added for all drivers: `Facts.tensor` makes
a tensor of an array, because operators of some frameworks refuse NumPy's arrays. Two modules were
added: `execution` has what several drivers had written of their own, such as the backward program
of an op that has one backward op, and `immutable_parameters` finds weights where arrays are never
written. Only drivers that need them import them.

{drivers}
"""


def python_lines(folder: str) -> int:
    """Return how many source lines of Python a driver has."""
    return lines_of_package(ROOT / folder / "src")


def native_lines(folder: str) -> int:
    """Return how many lines of C and C++ a driver has, without the headers that the core owns."""
    files = [
        path
        for path in (ROOT / folder / "src").rglob("*")
        if path.suffix in (".c", ".cpp", ".h") and not path.name.startswith("amanda_")
    ]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def reports() -> Iterator[Mapping[str, Any]]:
    """Yield what the kit reported of each mode of each driver."""
    for path in sorted(RESULTS.glob("*.kit.json")):
        yield from json.loads(path.read_text(encoding="utf-8"))


def summarise(name: str, files: Sequence[str]) -> None:
    """Keep of the kit's reports of one environment how many tests passed in each mode."""
    found = []
    for file in files:
        for backend in json.loads(Path(file).read_text(encoding="utf-8"))["backends"]:
            driver, *_, mode = backend["namespaces"][0].split("/")
            groups = backend["tests"].values()
            found.append(
                {
                    "driver": driver,
                    "mode": mode,
                    "passed": sum(len(group["passed"]) for group in groups),
                    "failed": sum(len(group["failed"]) for group in groups),
                    "left_out": sum(len(group["skipped"]) for group in groups),
                }
            )
    (RESULTS / f"{name}.kit.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def tool_table() -> str:
    """Return the table of backends and tools."""
    rows: dict[str, dict[str, str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        if not path.name.endswith(".kit.json"):
            rows.update(json.loads(path.read_text(encoding="utf-8")))
    frameworks = ("PyTorch", "TensorFlow", "JAX", "MXNet")
    order = [name for each in frameworks for name in rows if name.startswith(each)]
    lines = [f"| backend | version | {' | '.join(TOOLS)} |", "|---" * (len(TOOLS) + 2) + "|"]
    for name in order:
        cells = [rows[name][tool] for tool in TOOLS]
        lines.append(f"| {name} | {rows[name]['version']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def driver_table() -> str:
    """Return the table of what each driver costs."""
    lines = [
        "| driver | lines of Python | lines of C | mode: tests of the kit passed, left out |",
        "|---|---|---|---|",
    ]
    found = list(reports())
    for driver, folder in DRIVERS.items():
        if not (ROOT / folder / "src").is_dir():
            continue
        modes = [
            f"{report['mode']}: {report['passed']}, {report['left_out']}"
            + f", {report['failed']} failed" * bool(report["failed"])
            for report in found
            if report["driver"] == driver
        ]
        native = native_lines(folder) or "none"
        cells = [driver, python_lines(folder), native, "; ".join(modes) or "not run yet"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:]:
        summarise(sys.argv[1], sys.argv[2:])
    PAGE.write_text(TEXT.format(tools=tool_table(), drivers=driver_table()), encoding="utf-8")
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}{tool_table()}\n{END}{after}", encoding="utf-8")
