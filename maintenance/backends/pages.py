"""Write docs/backends.md of the results of all environments.

Each environment has two files in `results`: NAME.json, which one_tool.py makes, and NAME.kit.json,
a summary of the conformance kit's report, which `pages NAME REPORT...` makes.
`nox -s backends` runs all of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda_core.testing.checks.source_lines import lines_of_code, lines_of_package

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs/backends.md"
TOOLS = ("count", "prune", "edit gradients", "replace", "trace")
#: Driver -> its folder.
DRIVERS = {
    "pytorch": "amanda_driver_torch",
    "tensorflow": "amanda_driver_tf",
    "jax": "amanda_driver_jax",
    "mxnet": "amanda_driver_mxnet",
    "mindspore": "amanda_driver_mindspore",
    "onnxruntime": "amanda_driver_onnxruntime",
}

TEXT = """\
# Backends

This page is made of results by `nox -s backends`.

## One tool, every backend

[One file of tools](../tests/portable/tools.py) runs unchanged on each backend, forward and
backward. A perceptron is computed twice under each tool, with routines on the host and with staged
ones, and once after it. *As by hand*: the output and the gradients are those of the same
computation with the edit written into it, the routines ran as often as their operators, and the
results afterwards are the plain ones. Where the framework only infers, that is the output.

{tools}

## What a new driver costs

A driver connects a framework to Amanda. These are the costs of ours. Lines of
Python are those without comments, docstrings and blank lines. A test of the
[conformance kit](conformance.md) is left out if the driver does not declare its capability, or if
the framework lacks its program; the kit's report says which. No file of the core was changed for
one backend, and none names a framework. One method was added for all drivers: `Facts.tensor` makes
a tensor of an array, because operators of some frameworks refuse NumPy's arrays. Modules were added
that have what several drivers had written of their own; only drivers that need them import them:

- `declarations` reads the table `driver.toml` of a driver: its description, the common types of its
  operators, the roles of their inputs, what it does not instrument, and lists of names, such as
  those of the framework's files. These lines are counted by themselves.
- `declared_hooks` has the hooks of a driver with such a table: the description, the check of the
  framework's release, and the refusal to attach where results would be wrong.
- `execution` has the order in which an op is analysed, edited and computed, the backward program of
  an op that has one backward op, and the record of an op.
- `zones` and `module_paths` find the part of a program that runs, and the paths of modules.
- `frame_locals` finds the methods that run, and `contiguous` where tensors without strides
  lie.

{drivers}

JAX's driver is larger than MXNet's, which has no interceptor in C either: JAX does not tell which
operators the user called and which one of its transformations did, and whether a compiled program
has the tools of now; and one call of an operator may be traced, differentiated, mapped and compiled
in any nesting. Its lines, by what they buy:

{jax}

That of ONNX Runtime has more lines than others without gradients, because it also writes models: a
third of them are for `amanda export`, and for routines that become nodes of a model.

{onnxruntime}

## What an eager operator of JAX costs

Instructions of one call, in thousands, counted by `maintenance/benchmarks/jax_bench.py`; in
parentheses the multiple of *trace alone*. JAX runs a jitted function such as `jnp.add` in C++.
Whoever intercepts operators sends it through JAX's Python path, which is what *trace alone* does
without Amanda. The aim is at most 1.3 times that, or 40 µs over plain. `lax.sin` runs in JAX's
Python path anyway, so only the second holds for it. These costs are of JAX 0.12.0.1 on 2026-12-01,
later than the rest of this page.

{costs}

Microseconds of a call, by `maintenance/benchmarks/jax_times.py`: 1,000 pairs of runs of 20 calls
in one process, plain and with a tool. They depend on the machine, and the median also on what else
it runs. A jitted call into which nothing is inserted may take 15 µs over plain.

{times}
"""
#: What the modules of a driver buy: driver -> module -> meaning.
PARTS: dict[str, dict[str, str]] = {}
PARTS["onnxruntime"] = {
    "attachment": "five ways to run a session, which sessions run without tools, and why",
    "execution.bodies": "If, Loop and Scan by their bodies",
    "execution.parts": "sessions of parts of a model, and the values between them",
    "execution.program": "where a model is cut, one session for observers, one operator",
    "execution.routines": "which routines become nodes",
    "execution.weaving": "a model with edits in it, as one model",
    "facts": "facts about arrays, and their arithmetic",
    "graphs": "what a model consists of: nodes in any order, weights, bodies, local functions",
    "identity": "module paths and source lines by the exporter's metadata; weights",
    "interception": "the replaced methods",
    "model_files": "`amanda export`: inputs, checks, comparison, files of weights",
    "onnxruntime_internals.bindings": "what a program bound, and where it wants results",
    "onnxruntime_internals.sessions": "entry points; models and options of sessions",
    "onnxruntime_internals.values": "values as arrays, also of types that NumPy does not have",
    "plugin": "the hooks",
    "staging.__init__": "what others import of the next three",
    "staging.functions": "NumPy's functions as nodes",
    "staging.quantization": "quantization by operators",
    "staging.recording": "values that record what a routine computes",
    "vocabulary": "common types by ranks and attributes; layouts",
}
PARTS["jax"] = {
    "attachment": "operators one by one, in C++ where JAX would run them there; outermost calls",
    "execution": "analysis and edits of an operator, in every transformation",
    "gradients": "backward programs of operators",
    "value_primitives": "edits and taps of gradients that every transformation can pass",
    "self_test": "whether a release that was not tried works",
    "routines": "routines in compiled programs: staged, observing, editing, random keys, errors",
    "interception": "operators that JAX runs in C++; the arguments of what is being traced",
    "identity.call_sites": "which frames are JAX's transformations, its operators, and the user's",
    "identity.path_sites": "the op that is called where modules are known by their paths",
    "identity.path_modules": "the module that runs, where programs make modules again at each call",
    "identity.current_arrays": "the array that a parameter is now, to save it",
    "identity.modules": "what is a module of Flax (NNX, Linen) and Equinox, and what it holds",
    "identity.parameter_index": "the parameters of a tree by their arrays, for one trace",
    "identity.plain_trees": "parameters of programs without modules",
    "identity.zones": "which part of a program runs that is not the model, such as an optimizer",
    "module_calls": "calls of modules, whose values tools may look at and change",
    "stacked_layers": "layers that a program scans over, as the loop that they are",
    "identity.immutable_parameters": "weights in arrays that are never written",
    "jax_internals": "private names; a callback that no transformation drops or repeats",
    "contractions": "axes of products and transpositions",
    "facts": "facts about arrays and tracers",
    "trace_keys": "programs with tools and plain ones side by side, without a retrace",
    "plugin": "the hooks",
    "arrays": "values under tracers; edits whose gradient goes straight through",
    "vocabulary": "layouts of convolutions and products",
}


def python_lines(folder: str) -> int:
    """Return how many source lines of Python a driver has."""
    return lines_of_package(ROOT / folder / "src")


def table_lines(folder: str) -> int:
    """Return how many lines of its table say something."""
    lines = [
        line.strip()
        for path in (ROOT / folder / "src").rglob("driver.toml")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return len([line for line in lines if line and not line.startswith("#")])


def part_table(driver: str) -> str:
    """Return the table of the modules of a driver."""
    folder = ROOT / DRIVERS[driver] / "src" / DRIVERS[driver]
    lines = ["| module | lines | what they buy |", "|---|---|---|"]
    counts = {
        ".".join(path.relative_to(folder).with_suffix("").parts): lines_of_code(
            path.read_text(encoding="utf-8")
        )
        for path in folder.rglob("*.py")
    }
    for module, count in sorted(counts.items(), key=lambda one: -one[1]):
        if count:
            lines.append(f"| `{module}` | {count} | {PARTS[driver][module]} |")
    return "\n".join(lines)


def cost_table() -> str:
    """Return the table of the instructions of JAX's eager operators."""
    found = json.loads((RESULTS / "costs/jax.json").read_text(encoding="utf-8"))
    ways = list(next(iter(found.values())))
    lines = [f"| operator | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for operator, counts in found.items():
        cells = [
            f"{count / 1000:.0f} ({count / counts['trace alone']:.2f})" for count in counts.values()
        ]
        lines.append(f"| `{operator}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def time_table() -> str:
    """Return the table of the microseconds of calls in JAX."""
    found = json.loads((RESULTS / "costs/jax_times.json").read_text(encoding="utf-8"))
    ways = list(next(iter(found.values())))
    lines = [f"| call | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    lines += [
        f"| {call} | {' | '.join(map(str, times.values()))} |" for call, times in found.items()
    ]
    return "\n".join(lines)


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
            driver = backend["driver"]
            groups = backend["tests"].values()
            found.append(
                {
                    "driver": driver,
                    "mode": backend["title"].removeprefix(driver).strip(),
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
    frameworks = ("PyTorch", "TensorFlow", "JAX", "MXNet", "MindSpore", "ONNX Runtime")
    order = [name for each in frameworks for name in rows if name.startswith(each)]
    lines = [f"| backend | version | {' | '.join(TOOLS)} |", "|---" * (len(TOOLS) + 2) + "|"]
    for name in order:
        cells = [rows[name][tool] for tool in TOOLS]
        lines.append(f"| {name} | {rows[name]['version']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def driver_table() -> str:
    """Return the table of what each driver costs."""
    lines = [
        "| driver | lines of Python | of tables | of C | mode: tests of the kit passed, left out |",
        "|---|---|---|---|---|",
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
        tables = table_lines(folder) or "none"
        kit = "; ".join(modes) or "not run yet"
        cells = [driver, python_lines(folder), tables, native, kit]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:]:
        summarise(sys.argv[1], sys.argv[2:])
    text = TEXT.format(
        tools=tool_table(),
        drivers=driver_table(),
        jax=part_table("jax"),
        onnxruntime=part_table("onnxruntime"),
        costs=cost_table(),
        times=time_table(),
    )
    PAGE.write_text(text, encoding="utf-8")
