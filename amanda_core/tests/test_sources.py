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
from amanda_core.testing.source_lines import lines_of_code

from .site import Site

SOURCES = [
    path
    for package in (amanda, amanda_core)
    for root in package.__path__
    for path in sorted(Path(root).rglob("*.py"))
]
#: Names of frameworks and their drivers, as they would occur in code.
BACKENDS = ("torch", "tensorflow", "jax", "mxnet", "mindspore", "keras", "paddle", "onnx")
#: Some modules of the engine, which does not include `cli`, `config` and `testing`.
ENGINE = ("tool", "context", "action", "plan", "session", "hookspecs", "discovery")
BESIDE = ("amanda_core.cli", "amanda_core.config", "amanda_core.testing")


def is_engine(path: Path) -> bool:
    return path.parent.name == "amanda_core" and path.stem not in ("cli", "config", "testing")


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
    found = {path.stem for path in SOURCES if path.parent.name == "amanda_core"}
    assert set(ENGINE) <= found


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
    "path", [path for path in SOURCES if is_engine(path)], ids=lambda path: path.stem
)
def test_the_engine_does_not_import_what_stands_beside_it(path: Path) -> None:
    wanted = imported(path)
    assert not [name for name in wanted if name.startswith(BESIDE)]
    assert not [name for name in wanted if name.partition(".")[0] == "amanda"]


def test_source_lines_are_those_that_do_something() -> None:
    assert lines_of_code('"""Doc\n\nmore."""\n\n# Why.\nx = 1\n\ndef f():\n    """Do."""\n') == 2


#: Applies a tool to one operator of the toy framework: analysed, edited, released.
ONE_OPERATOR = """
import sys
import amanda
import toyframe
tool = amanda.Tool()
tool.add_inst_for_op(lambda c: c.insert_after_op(lambda y: toyframe.Value(y.data + 1)))
with amanda.apply(tool):
    assert toyframe.relu(toyframe.Value(2.0)).data == 3.0
assert toyframe.relu(toyframe.Value(2.0)).data == 2.0
for name, module in sys.modules.items():
    if name.partition(".")[0] == "amanda_core":
        print(name, module.__file__)
"""
#: What has a bound of its own: which operator is which, and which weight it reads.
APART = ("identity", "weights")


def test_the_engine_stays_small(tmp_path: Path) -> None:
    # All that is loaded counts, wherever it is imported.
    site = Site(tmp_path)
    done = site.python("-c", ONE_OPERATOR)
    assert done.returncode == 0, done.stderr
    loaded = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert {f"amanda_core.{name}" for name in ENGINE} <= set(loaded)
    assert not [name for name in loaded if name.startswith(BESIDE)]
    lines = {name: lines_of_code(Path(file).read_text()) for name, file in loaded.items()}
    for apart in APART:
        own = [name for name in lines if apart in name.split(".")]
        assert sum(lines.pop(name) for name in own) <= 500, apart
    assert sum(lines.values()) <= 2100, lines


def test_the_rule_of_identity_stays_small() -> None:
    paths = [path for path in SOURCES if path.name in ("identity.py", "scopes.py", "sites.py")]
    assert len(paths) == 3
    assert sum(lines_of_code(path.read_text()) for path in paths) <= 470


def test_weights_stay_small() -> None:
    paths = [path for path in SOURCES if path.parent.name == "weights"]
    assert len(paths) >= 5
    assert sum(lines_of_code(path.read_text()) for path in paths) <= 500


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
    assert {"amanda_core.tool", "amanda_core.action", "amanda_core.namespace"} <= {
        name for name in MODULES if examples(name)
    }


def test_every_module_says_what_it_owns_in_at_most_eight_lines() -> None:
    for path in SOURCES:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, path
        assert len(re.split("\n", docstring)) <= 8, path
