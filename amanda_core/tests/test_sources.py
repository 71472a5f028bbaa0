"""Rules for the core's sources: what they contain and import, and that their examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import pkgutil
import re
import tokenize
from pathlib import Path

import pytest

import amanda
import amanda_core
from amanda_core.testing.checks.source_lines import lines_of_code, lines_of_package

SOURCES = [
    path
    for package in (amanda, amanda_core)
    for root in package.__path__
    for path in sorted(Path(root).rglob("*.py"))
]
#: Names of frameworks and their drivers, as they would occur in code.
BACKENDS = ("torch", "tensorflow", "jax", "mxnet", "mindspore", "keras", "paddle", "onnx")
CORE = Path(amanda_core.__file__).parent
#: What nothing of the core but the command line and the tests imports.
BESIDE = ("amanda_core.cli", "amanda_core.config", "amanda_core.testing")
#: Folder -> how many lines of code it may have. These are alarms with air, not design: a folder
#: that reaches its bound has taken on a second concern. The vocabulary, a table that grows with the
#: operators that frameworks have in common, does not count.
BOUNDS = {"engine": 2600, "interface": 450}
TABLE = CORE / "interface" / "vocabulary.py"


def is_beside(path: Path) -> bool:
    parts = path.relative_to(CORE).parts if path.is_relative_to(CORE) else ()
    return any(f"amanda_core.{part}" in BESIDE for part in parts[:1])


def imported(path: Path) -> set[str]:
    """Return all modules that a source file imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_the_sources_were_found() -> None:
    found = {path.relative_to(CORE).parts[0] for path in SOURCES if path.is_relative_to(CORE)}
    assert {"interface", "runtime", "engine", "errors.py"} <= found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_sources_import_no_framework_and_no_numpy(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imported(path)}
    assert tops.isdisjoint({*BACKENDS, "numpy"})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_code_mentions_no_backend(path: Path) -> None:
    # Docstrings may give examples of namespaces; names and other strings may not.
    source = path.read_text()
    docs = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and ast.get_docstring(node, clean=False) is not None
    }
    kinds = {tokenize.NAME, tokenize.STRING}
    if hasattr(tokenize, "FSTRING_MIDDLE"):
        kinds.add(tokenize.FSTRING_MIDDLE)
    code = [
        token.string.lower()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in kinds and token.start not in docs
    ]
    assert not [word for word in code for backend in BACKENDS if backend in word]


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.is_relative_to(CORE) and not is_beside(path)],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_the_core_does_not_import_its_command_line_nor_the_facade(path: Path) -> None:
    wanted = imported(path)
    assert not [name for name in wanted if name.startswith(BESIDE)]
    assert not [name for name in wanted if name.partition(".")[0] == "amanda"]


def test_source_lines_are_those_that_do_something() -> None:
    assert lines_of_code('"""Doc\n\nmore."""\n\n# Why.\nx = 1\n\ndef f():\n    """Do."""\n') == 2


@pytest.mark.parametrize("folder", BOUNDS)
def test_the_rooms_that_everybody_enters_stay_small(folder: str) -> None:
    counted = lines_of_package(CORE / folder)
    if TABLE.is_relative_to(CORE / folder):
        counted -= lines_of_code(TABLE.read_text("utf-8"))
    assert 0 < counted <= BOUNDS[folder]


def test_the_facade_has_no_logic() -> None:
    for path in SOURCES:
        if path.parent.name == "amanda" or path.parent.parent.name == "amanda":
            functions = [
                node.name
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            ]
            assert functions in ([], ["__getattr__"]), path


MODULES = [
    "amanda",
    "amanda.tool",
    *(
        module.name
        for module in pkgutil.walk_packages(amanda_core.__path__, "amanda_core.")
        if not module.name.startswith(BESIDE)
    ),
]


def examples(name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder().find(importlib.import_module(name))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", [name for name in MODULES if examples(name)])
def test_the_examples_of_the_documentation_run(name: str) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples(name):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_some_examples_exist() -> None:
    assert {
        "amanda_core.engine.tool",
        "amanda_core.engine.action",
        "amanda_core.interface.namespace",
    } <= {name for name in MODULES if examples(name)}


def test_every_module_says_what_it_owns_in_at_most_eight_lines() -> None:
    for path in SOURCES:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, path
        assert len(re.split("\n", docstring)) <= 8, path
