"""Installed distributions are complete: they have everything that the checkout has, and no more.

`nox -s packages` builds them and checks each in an environment of its own.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = ["amanda_core", "amanda_driver_tf", "amanda_driver_torch", "amanda_tools"]
# Sources in C and C++ belong only to source distributions, and editors' backup files to none.
COMPILED = {".c", ".cpp", ".h", ".so", ".pyd", ".pyc"}

pytestmark = pytest.mark.one_interceptor


def installed(member: str) -> Any:
    found = importlib_metadata.distribution(member.replace("_", "-"))
    if '"editable": true' in (found.read_text("direct_url.json") or ""):
        pytest.skip(f"{member} is installed as an editable, which has no files of its own")
    return found


@pytest.mark.parametrize("member", MEMBERS)
def test_nothing_is_forgotten_and_nothing_else_is_there(member: str) -> None:
    source = ROOT / member / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and path.suffix not in COMPILED and ".egg-info" not in str(path)
    }
    files = [Path(str(path)) for path in installed(member).files or ()]
    there = {
        path.as_posix()
        for path in files
        if path.suffix not in COMPILED
        and ".dist-info" not in path.parts[0]
        and path.parts[0] != ".."
    }
    assert there == wanted
    assert any(path.name == "py.typed" for path in files)


@pytest.mark.parametrize("member", MEMBERS)
def test_what_they_need_of_one_another_is_declared(member: str) -> None:
    needed = " ".join(importlib_metadata.requires(member.replace("_", "-")) or ())
    assert ("amanda-core" in needed) == (member != "amanda_core")


@pytest.mark.parametrize("driver", ["amanda_driver_tf", "amanda_driver_torch"])
def test_a_driver_writes_down_the_interface_that_it_is_made_for(driver: str) -> None:
    calls = [
        node
        for path in (ROOT / driver / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DriverInfo"
    ]
    (api,) = (keyword.value for call in calls for keyword in call.keywords if keyword.arg == "api")
    # A constant of the installed core would agree with every core.
    assert isinstance(api, ast.Constant)
    assert isinstance(api.value, int)


@pytest.mark.parametrize(
    "driver",
    [
        "amanda_driver_jax",
        "amanda_driver_mindspore",
        "amanda_driver_mxnet",
        "amanda_driver_onnxruntime",
        "examples/driver_numpy",
    ],
)
def test_so_does_one_with_a_table(driver: str) -> None:
    (table,) = (ROOT / driver / "src").rglob("driver.toml")
    assert isinstance(tomllib.loads(table.read_text())["driver"]["api"], int)


def test_entry_points_are_found() -> None:
    command = [sys.executable, "-m", "amanda", "drivers", "--json"]
    drivers = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert {driver["name"] for driver in drivers} == {"onnxruntime", "pytorch", "tensorflow"}
