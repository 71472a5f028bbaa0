"""Each private part of PyTorch that the driver reads: its page, and programs without it."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import amanda_driver_torch
from amanda_driver_torch.torch_internals import extension
from amanda_driver_torch.torch_internals.internals import BUILD
from amanda_driver_torch.torch_internals.versions import are_graphs_tried, are_hooks_tried

from . import missing_symbols, torch_symbols
from .test_private_names import OWNERS, sources
from .torch_symbols import GROUPS, LAYOUTS, SYMBOLS, Group, Without

pytestmark = [
    pytest.mark.skipif(extension.native is None, reason=extension.missing),
    pytest.mark.one_interceptor,
]

REMOVED = [(group, name) for group in GROUPS for name in group.names]


def outcome(name: str, compiled: bool) -> dict[str, Any]:
    return _outcomes(compiled)[name]


@functools.cache  # One program for all, since it takes long to import PyTorch.
def _outcomes(compiled: bool) -> dict[str, dict[str, Any]]:
    names = ["", *(name for group, name in REMOVED if group.compiled == compiled)]
    program = [sys.executable, missing_symbols.__file__]
    if compiled:
        program.append(missing_symbols.COMPILED)
    done = subprocess.run(program, input=json.dumps(names), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def _attribute(name: str) -> str:
    return name.replace(":", ".").rpartition(".")[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.parametrize(
    ("group", "name"), [pytest.param(group, name, id=name) for group, name in REMOVED]
)
def test_a_program_runs_on_without(group: Group, name: str) -> None:
    if group.compiled and not are_graphs_tried(BUILD):
        pytest.skip("compiled callables run eagerly with this release")
    found, intact = outcome(name, group.compiled), outcome("", group.compiled)
    if "absent" in found:
        pytest.skip("this release is without it")
    same = (intact["values"], intact["seen"])
    if group.without is Without.TORCH:
        assert "torch" in found or (found["values"], found["seen"]) == same
        return
    assert found["after"], "without tools the program is as before"
    if group.without is Without.REFUSED:
        assert _attribute(name) in found["refused"]
    elif group.without is Without.FAILS:
        assert _attribute(name) in found["error"]
        assert found["skipped"]
    else:
        assert "error" not in found, found["error"]
        assert "refused" not in found, found["refused"]
        if group.without is Without.PARTLY:
            assert len(found["gaps"]) >= len(intact["gaps"])
        elif group.without is Without.EAGER:
            assert found["values"] == intact["values"]
            assert intact["compiled"]
            assert not found["compiled"]
        else:
            assert (found["values"], found["seen"]) == same
    if group is LAYOUTS[0]:
        assert intact["graphs"] == are_hooks_tried(BUILD)
        assert not found["graphs"]


def test_the_page_lists_them() -> None:
    assert torch_symbols.PAGE.read_text("utf-8") == torch_symbols.page(), (
        f"run {torch_symbols.__file__}"
    )


def test_the_table_has_all_that_the_sources_name() -> None:
    """It may have more: names that only some releases have."""
    listed = {
        part
        for name in (
            *(name for _, name in REMOVED),
            *torch_symbols.COMPARED,
            *torch_symbols.OF_MODULES,
            *torch_symbols.OF_FUNCTIONS,
            *torch_symbols.OF_DYNAMO,
            *torch_symbols.OF_DISTRIBUTED,
            *torch_symbols.OF_COLLECTIVES,
            *torch_symbols.OF_WRITERS,
        )
        for part in name.replace(":", ".").split(".")
    }
    owners = [name for name in OWNERS if "internals" in name or "dynamo" in name or ".h" in name]
    named = {
        line.rpartition(": ")[2].rstrip(".").rpartition(".")[2]
        for owner in owners
        for line in sources().mentions(owner)
    }
    assert len(named) > 100
    # Prefixes of what nodes have saved.
    assert named - listed - {"_raw_saved_", "_saved_"} == set()


def test_the_table_has_all_symbols_of_the_extension() -> None:
    listed = {_attribute(name) for group in SYMBOLS for name in group.names}
    assert listed == set(extension.native.symbols())


def test_the_table_has_all_layouts_that_the_extension_finds() -> None:
    listed = {_attribute(name) for group in LAYOUTS for name in group.names}
    text = sources().texts["native/gradients/graphs.cpp"]
    assert listed > set(re.findall(r'is_hidden\("(\w+)"\)', text)) > {"edges"}


@pytest.mark.skipif(not are_hooks_tried(BUILD), reason="this build may have other symbols")
def test_tried_releases_have_all_symbols() -> None:
    amanda_driver_torch.interceptor()
    assert [name for name, found in extension.native.symbols().items() if not found] == []


@pytest.mark.slow
@pytest.mark.exhaustive  # It compiles the extension.
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_an_extension_without_cpythons_internals_sees_the_same(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    left_by_builds = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info")
    shutil.copytree(root, tmp_path / "driver", ignore=left_by_builds)
    source = str(tmp_path / "driver/src")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CFLAGS": "-DAMANDA_PUBLIC_FRAMES", "PYTHONPATH": path}
    run = functools.partial(
        subprocess.run, env=environment, check=True, capture_output=True, text=True
    )
    run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tmp_path / "driver")
    frames = "from amanda_driver_torch import _native; print(_native.__file__, _native.FRAMES)"
    said = run([sys.executable, "-c", frames]).stdout
    assert said.startswith(source)
    assert said.endswith(" frame objects\n")
    found = run([sys.executable, missing_symbols.__file__], input=json.dumps([""])).stdout
    assert json.loads(found)[""] == outcome("", False)
