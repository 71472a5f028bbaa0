"""Consistency of the tiers: every file has a shard, and no shard or tier takes too long."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORES = 2
DURATIONS: dict[str, dict[str, list[float]]] = json.loads(
    (ROOT / "maintenance/tiers/durations.json").read_text()
)


@pytest.fixture(scope="module")
def noxfile() -> Any:
    pytest.importorskip("nox", reason="nox is installed where the sources are checked")
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # It adds the root, for its imports.
        spec.loader.exec_module(module)
    return module


def files_of(shard: Any) -> set[str]:
    """Return the test files that a shard runs."""
    found = set()
    for pattern in shard.paths:
        for path in ROOT.glob(pattern):
            for file in [path] if path.is_file() else path.rglob("test_*.py"):
                name = str(file.relative_to(ROOT))
                loads = name.startswith(("amanda_driver_tf/tests", "tests/portable"))
                # Installing a member may leave a copy of its sources in `build`; pytest skips it.
                sources = "/src/" in name or "/build/" in name
                if loads == shard.tensorflow and not sources:
                    found.add(name)
    return found


@pytest.mark.slow
def test_every_file_is_in_one_shard(noxfile: Any) -> None:
    native = [shard for shard in noxfile.SHARDS.values() if not shard.env]
    files = [file for shard in native for file in files_of(shard)]
    assert sorted(files) == sorted(set(files))
    tests = [*ROOT.glob("amanda_*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]
    assert set(files) == {str(path.relative_to(ROOT)) for path in tests}


@pytest.mark.slow
def test_references_installs_copies_of_the_members(noxfile: Any) -> None:
    installed: list[str] = []

    def install(*arguments: str) -> None:
        # The copies are there only now.
        installed.extend(text for text in arguments if Path(text, "pyproject.toml").is_file())

    session = SimpleNamespace(install=install, run=lambda *command: None, posargs=[])
    noxfile.references.func(session)
    assert {Path(path).name for path in installed} == {
        *("amanda_core", "amanda_driver_torch", "amanda_tools")
    }
    assert not any(Path(path).resolve().is_relative_to(ROOT) for path in installed)


@pytest.mark.slow
def test_shards_take_at_most_twelve_minutes(noxfile: Any) -> None:
    for name, shard in noxfile.SHARDS.items():
        seconds = sum(sum(map(max, DURATIONS.get(file, {}).values())) for file in files_of(shard))
        assert seconds / CORES < 12 * 60, name


def test_what_only_further_packages_can_run_is_slow() -> None:
    """The fast tests run where those are not installed, and CI runs no fast test again."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    further = {package for package in groups["all-tests"] if isinstance(package, str)}
    files = [*ROOT.glob("amanda_*/tests/**/*.py"), *ROOT.glob("tests/**/*.py")]
    found = [test for file in files for test in skipping_tests(file, further)]
    assert len(found) > 10
    assert [name for name, is_fast in found if is_fast] == []


def skipping_tests(path: Path, packages: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield what skips without one of `packages`, and whether it is a fast test."""
    tree = ast.parse(path.read_text())
    of_all = "".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign))
    for node in tree.body:
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
        skips = [call for call in calls if ast.unparse(call.func) == "pytest.importorskip"]
        given = [call.args[0] for call in skips]
        needed = {str(one.value).split(".")[0] for one in given if isinstance(one, ast.Constant)}
        if needed & packages:
            marks = "".join(map(ast.unparse, getattr(node, "decorator_list", ()))) + of_all
            name = getattr(node, "name", "test_*")
            is_slow = "mark.slow" in marks or "mark.exhaustive" in marks
            yield f"{path.relative_to(ROOT)}: {name}", name.startswith("test_") and not is_slow


def test_durations_are_of_files_that_exist() -> None:
    assert [file for file in DURATIONS if not (ROOT / file).exists()] == []
