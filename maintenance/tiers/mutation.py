"""Insert defects into the sources, one at a time, and report which the fast tests find.

`nox -s mutation`. A seed draws lines of core, drivers and tools, and for each line one possible
defect. The tests that run the line (by coverage.py's contexts), and then some that run other lines
of the module, run against a copy of the packages with the defect, fastest first, until one fails.
Writes docs/internals/mutation.md.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import importlib.util
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = ["amanda_core", "amanda_driver_tf", "amanda_driver_torch", "amanda_tools"]
PAGE = ROOT / "docs/internals/mutation.md"
#: CPU seconds by file and test function; conftest.py says more.
DURATIONS = ROOT / "maintenance/tiers/durations.json"
#: Defects that nobody could tell from the original: by file and change, why.
EQUIVALENT = {
    (
        "amanda_tools/src/amanda_tools/diff/numbers.py",
        "constant: `True` → `False`",
    ): "`frozen` of a data class that nothing writes",
    (
        "amanda_core/src/amanda_core/plugins/discovery.py",
        "constant: `True` → `False`",
    ): "`frozen` of a data class that nothing writes",
    (
        "amanda_driver_torch/src/amanda_driver_torch/attachment/attachment.py",
        "statement deleted: `self.watch = None` → `pass`",
    ): "the attachment is released right after it, with all that it holds",
    (
        "amanda_core/src/amanda_core/identity/sites.py",
        "constant: `0` → `1`",
    ): "the number stands in the label of every named function, and is compared with itself alone",
    (
        "amanda_tools/src/amanda_tools/latency/device_events.py",
        "comparison: `len(self._pending) > self._waiting` → `len(self._pending) >= self._waiting`",
    ): "events are asked for one earlier, and give the same times",
    (
        "amanda_driver_tf/src/amanda_driver_tf/graphs/recorder.py",
        "returns None: `return original(op, out_grads, in_grads)` → `return None`",
    ): "TensorFlow's own function returns None",
}
UNTRACED = [
    "amanda_core/tests/test_cli.py::test_listing_imports_neither_a_framework_nor_a_tool",
    "amanda_core/tests/test_cli.py::test_a_damaged_distribution_hides_no_other",
    "amanda_core/tests/test_doctor.py",
]
#: How many test functions to run for a defect: of those that run the line, and then others.
_MOST_OF_LINE, _MOST_OF_MODULE = 400, 100
TENSORFLOW = ("amanda_driver_tf/tests/", "tests/portable/")


@dataclass(frozen=True)
class Defect:
    """One change of one line."""

    file: str
    line: int
    what: str
    #: The whole text of the changed module.
    source: str

    @property
    def name(self) -> str:
        """Return the place of the defect."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Verdict:
    """Result of the tests for a defect: the test that failed, or None."""

    defect: Defect
    tests: int
    killer: str | None


SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield the nodes that can be changed, with a description and the replacement."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # Annotations are not run, and a default of None mostly stands for a type.
            for annotated in [*ast.walk(node.args), node.returns]:
                annotation = getattr(annotated, "annotation", None)
                for part in [annotation, annotated if annotated is node.returns else None]:
                    skipped |= {id(inner) for inner in ast.walk(part)} if part else set()
        if isinstance(node, ast.AnnAssign):
            skipped |= {id(inner) for inner in ast.walk(node.annotation)}
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(inner) for inner in ast.walk(node)}
        if isinstance(node, ast.JoinedStr):
            # The wording of a message is nobody's contract.
            skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
            new: ast.AST = ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)  # type: ignore[arg-type]
            yield node, "operator", new
        elif isinstance(node, ast.BoolOp):
            yield node, "and/or", ast.BoolOp(SWAPPED[type(node.op)](), node.values)  # type: ignore[arg-type]
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
            ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
            yield node, "comparison", ast.Compare(node.left, ops, node.comparators)  # type: ignore[arg-type]
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "constant", ast.Constant(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield node, "constant", ast.Constant(node.value + 1)
        elif isinstance(node, (ast.If, ast.IfExp)):
            yield node.test, "condition negated", ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise)):
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            at_top = node in tree.body
            if not docstring and not at_top:
                yield node, "statement deleted", ast.Pass()
        elif isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
            yield node, "returns None", ast.Return(ast.Constant(None))


def defects(path: Path) -> dict[int, list[Defect]]:
    """Return the possible defects of a module by line."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    found: dict[int, list[Defect]] = {}
    for node, what, new in changes(ast.parse(text)):
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        if first != last:
            continue  # several lines are no line's defect
        line = lines[first - 1].encode()
        begin, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
        written = ast.unparse(new)
        if not isinstance(node, ast.stmt):
            written = f"({written})"
        changed = (line[:begin] + written.encode() + line[end:]).decode()
        source = "".join([*lines[: first - 1], changed, *lines[first:]])
        file = str(path.relative_to(ROOT))
        before = line[begin:end].decode()
        found.setdefault(first, []).append(
            Defect(file, first, f"{what}: `{before}` → `{ast.unparse(new)}`", source)
        )
    return found


def drawn(number: int, seed: int) -> list[Defect]:
    """Draw lines, and one defect for each."""
    by_line = [
        on_line
        for member in MEMBERS
        for path in sorted((ROOT / member / "src").rglob("*.py"))
        if "suite" not in path.parts  # the conformance kit's tests are tests
        for on_line in defects(path).values()
    ]
    choose = random.Random(seed)
    return [choose.choice(on_line) for on_line in choose.sample(by_line, number)]


def tests_by_line(data: coverage.CoverageData) -> dict[str, dict[int, list[str]]]:
    """Return the tests that run each line, by a module's path below `src`."""
    found = {}
    for file in data.measured_files():
        parts = Path(file).parts
        place = next(
            i
            for i, part in enumerate(parts)
            if part in ("amanda", *MEMBERS) and "src" not in parts[i:]
        )
        name = "/".join(parts[place:])
        found[name] = {
            line: sorted({function_of(context) for context in contexts if context})
            for line, contexts in data.contexts_by_lineno(file).items()
        }
    return found


def function_of(context: str) -> str:
    """Return the test function of a context; the context of a program names the case and its
    phase.
    """
    return context.split(" (")[0].split("[")[0]


def quickest_first(tests: list[str], seconds: dict[str, dict[str, list[float]]]) -> list[str]:
    """Sort tests by duration; tests of a file with equal durations stay together."""

    def key(test: str) -> tuple[float, str]:
        file, _, function = test.partition("::")
        taken = seconds.get(file, {}).get(function, [1.0])
        return round(max(taken), 1), test

    return sorted(tests, key=key)


def chosen_for(
    line: int, run_by: dict[int, list[str]], seconds: dict[str, dict[str, list[float]]]
) -> list[str]:
    """Return the tests that run a line, and then others that run the module.

    A line that runs once per process (at import, or behind `functools.cache`) is only attributed to
    the first test.
    """
    own = quickest_first(run_by.get(line, []), seconds)
    others = {test for tests in run_by.values() for test in tests}.difference(own)
    return [*own[:_MOST_OF_LINE], *quickest_first([*others], seconds)[:_MOST_OF_MODULE]]


def judged(defect: Defect, tests: list[str], packages: Path, limit: float) -> Verdict:
    """Insert a defect into a copy of the packages, run tests against it, and remove it again."""
    below = defect.file.split("/src/", 1)[1]
    module = packages / below
    before = module.read_text(encoding="utf-8")
    module.write_text(defect.source, encoding="utf-8")
    env = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    try:
        for group, interceptor in grouped(tests, defect.file.startswith("amanda_driver_torch")):
            listed = packages.parent / f"{packages.name}.tests"
            listed.write_text("\n".join(group))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
            try:
                done = subprocess.run(
                    [*command, "--no-header", "--tb=no", "-rf", f"@{listed}"],
                    cwd=ROOT,
                    env={**env, **interceptor},
                    capture_output=True,
                    text=True,
                    timeout=limit,
                )
            except subprocess.TimeoutExpired:
                # Without the defect these tests end well before.
                return Verdict(defect, len(tests), f"no end within {limit:.0f} s")
            if done.returncode not in (0, 5):
                failed = [
                    line
                    for line in done.stdout.splitlines()
                    if line.startswith(("FAILED", "ERROR"))
                ]
                return Verdict(defect, len(tests), (failed or ["does not start"])[0][:160])
        return Verdict(defect, len(tests), None)
    finally:
        module.write_text(before, encoding="utf-8")


def grouped(tests: list[str], both: bool) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield tests in groups: small ones first, those that load TensorFlow separately, and the
    PyTorch driver's again with its interceptor in pure Python.
    """
    native = [test for test in tests if not test.startswith(TENSORFLOW)]
    pure = [test for test in tests if test.startswith("amanda_driver_torch/") and both]
    for chosen, interceptor in (
        (native, {}),
        (pure, {"AMANDA_TORCH_INTERCEPTOR": "function_mode"}),
        ([test for test in tests if test.startswith(TENSORFLOW)], {}),
    ):
        size = 30
        while chosen:
            yield chosen[:size], interceptor
            chosen, size = chosen[size:], size * 4


def main() -> int:
    """Judge all defects and write the page; return 1 if too many were not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="coverage.py's data of the fast tests")
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--member", choices=MEMBERS, action="append", help="of these defects alone")
    parser.add_argument("--least", type=int, default=85, help="how many the tests should find")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=300, help="seconds for some tests")
    options = parser.parse_args()
    data = coverage.CoverageData(str(options.data))
    data.read()
    run_by = tests_by_line(data)
    seconds = json.loads(DURATIONS.read_text())
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(options.processes):
            copies.put(copied(Path(folder, str(number))))

        def judge(defect: Defect) -> Verdict:
            below = defect.file.split("/src/", 1)[1]
            tests = chosen_for(defect.line, run_by.get(below, {}), seconds)
            if defect.file.startswith("amanda_core"):
                # These notice coverage.py, so that it does not know what they run.
                tests += UNTRACED
            packages = copies.get()
            try:
                return judged(defect, tests, packages, options.limit)
            finally:
                copies.put(packages)

        with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
            chosen = [
                defect
                for defect in drawn(options.number, options.seed)
                if not options.member or defect.file.split("/")[0] in options.member
            ]
            for verdict in pool.map(judge, chosen):
                verdicts.append(verdict)
                said = verdict.killer or f"NOT FOUND by {verdict.tests} tests"
                print(f"{verdict.defect.name}: {verdict.defect.what}: {said}", flush=True)
    return written(verdicts, options)


def copied(folder: Path) -> Path:
    """Copy the installed packages, compiled extensions included, into a folder."""
    for name in ("amanda", *MEMBERS):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        (place,) = list(spec.submodule_search_locations or [])
        shutil.copytree(place, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def written(verdicts: list[Verdict], options: argparse.Namespace) -> int:
    """Write the page; return the exit status."""
    equivalent = [
        v for v in verdicts if not v.killer and (v.defect.file, v.defect.what) in EQUIVALENT
    ]
    found = [v for v in verdicts if v.killer]
    left = [v for v in verdicts if not v.killer and v not in equivalent]
    by_member = Counter(v.defect.file.split("/")[0] for v in verdicts)
    found_by_member = Counter(v.defect.file.split("/")[0] for v in found)
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(
        asked, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    page = [
        "# Defects that the fast tests find",
        "",
        f"`nox -s mutation` made {len(verdicts)} defects (seed {options.seed}) in random lines of "
        "all Python sources, one at a time. A defect changes an operator, a constant or a "
        "condition, or deletes a statement. For each one the fast tests that execute the line "
        "were run, then some that execute other lines of the module. Lines are those of commit "
        f"{commit}.",
        "",
        f"Found: {len(found)}. Equivalent: {len(equivalent)}. Not found: {len(left)}.",
        "",
        "| member | defects | found |",
        "|---|---|---|",
        *(f"| {name} | {by_member[name]} | {found_by_member[name]} |" for name in MEMBERS),
        "",
        "## Not found",
        "",
        *(f"- `{v.defect.name}` {v.defect.what} ({v.tests} test functions were run)" for v in left),
        "",
        "## Equivalent: no test can find these",
        "",
        *(
            f"- `{v.defect.name}` {v.defect.what}: {EQUIVALENT[v.defect.file, v.defect.what]}"
            for v in equivalent
        ),
        "",
    ]
    PAGE.write_text("\n".join(page), encoding="utf-8")
    print(f"{len(found)} found, {len(equivalent)} equivalent, {len(left)} not found: {PAGE}")
    return int(len(found) < options.least * len(verdicts) / 100 - len(equivalent))


if __name__ == "__main__":
    sys.exit(main())
