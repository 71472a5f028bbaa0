"""What `amanda` lists and finds, as text and as JSON, and the errors that it ends with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

import amanda
from amanda_core.cli import app, main
from amanda_core.plugins import discovery
from amanda_core.plugins.requirements import extra_command
from amanda_core.testing.toy.driver import CAPABILITIES, ToyDriver

from .conftest import Installed
from .making import DISTRIBUTION, Point
from .site import Site, distribution
from .test_discovery import broken

SHOWN = """
import sys
from amanda_core.cli import main
try:
    main({arguments!r})
finally:
    print(*sys.modules, file=sys.stderr)
"""


class Noting(amanda.Tool):
    """Notes things.

    More of it.
    """

    def __init__(self, count: int, depth: float = 0.5, hook: Any = print, sign: object = None):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"))
    entries = "[amanda.drivers]\nworse = toyplugin_absent\n[amanda.tools]\ncount = elsewhere:T\n"
    distribution(made.path, "other-tools", "2.0", entries)
    return made


def call(*arguments: str) -> int:
    """Return the exit status of a command."""
    outcome = app.parse(arguments)
    assert isinstance(outcome, int)
    return outcome


def point(name: str, made: Any, group: str = discovery.TOOL_GROUP) -> Point:
    return Point(name, lambda: made, group, DISTRIBUTION)


# Nothing is imported that is not needed.


@pytest.mark.untraced
@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["tools"], ["tools", "--json"], ["drivers"]]
)
def test_listing_imports_no_framework(site: Site, arguments: list[str]) -> None:
    done = site.python("-c", SHOWN.format(arguments=arguments))
    assert done.returncode == 0, done.stderr
    modules = set(done.stderr.split())
    assert "click" in modules
    unwanted = {"toyframe", "torch", "numpy", "tensorflow", "jax", "rich", "tomllib"}
    assert not modules & unwanted
    # Only by importing them is it known which tools are broken.
    assert ("toytools" in modules) == (arguments[0] == "tools")
    assert ("toyplugin" in modules) == (arguments[0] in ("tools", "drivers"))


def test_the_program_and_the_module_are_the_same(site: Site) -> None:
    by_module = site.amanda("--version")
    assert by_module.stdout == f"amanda, version {amanda.__version__}\n"
    assert site.python("-c", "from amanda_core.cli import main; main(['--version'])").stdout == (
        by_module.stdout
    )
    assert site.amanda("--help").stdout.startswith("Usage: amanda [OPTIONS] COMMAND")


def test_without_click_the_extra_is_named(site: Site) -> None:
    hidden = "import sys; sys.modules['click'] = None; from amanda_core.cli import main; main()"
    done = site.python("-c", hidden)
    assert done.returncode == 1
    assert done.stderr == (
        "Error: The command line needs the extra cli of amanda-core. "
        f"Run: {extra_command('amanda-core', 'cli')}. [missing-extra]\n"
    )


def test_a_reader_that_has_enough_is_no_error(site: Site) -> None:
    with site.start("-m", "amanda", "tools") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) in (0, 1)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        process.stdout = None


# `amanda tools`.


def test_tools_are_listed_with_where_they_come_from(
    installed: Installed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.points += [
        point("noting", Noting),
        point("twice", Noting),
        point("twice", Noting),
        point("off\x1b[2J", 3),
        Point("lost", broken, discovery.TOOL_GROUP, None),
        point("seven", 7),
    ]
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", "off\x1b[2J, x")
    assert call("tools", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(tool["name"], tool["status"], tool["distribution"]) for tool in found] == [
        ("noting", "ok", "amanda-driver-toy"),
        ("twice", "duplicate", "amanda-driver-toy"),
        ("twice", "duplicate", "amanda-driver-toy"),
        ("off\x1b[2J", "blocked", "amanda-driver-toy"),
        ("lost", "broken", ""),
        ("seven", "broken", "amanda-driver-toy"),
    ]
    assert set(found[0]) == {
        *("name", "reference", "status", "distribution", "version", "factory", "about"),
        *("error", "fix", "works_on"),
    }
    assert found[0]["error"] is None
    assert found[4]["error"] == (
        "The tool 'lost' of unknown cannot be loaded: ImportError: libtoy.so is missing"
    )
    assert call("tools") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    name, status, *about, distribution, version = out.splitlines()[1].split()
    assert (name, status, distribution, version) == ("noting", "ok", "amanda-driver-toy", "0.4")
    assert " ".join(about) == found[0]["about"] == "Notes things."
    assert "libtoy.so is missing" in out


def test_entry_points_of_tools_are_read_once(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.points += [point(f"noting{number}", Noting) for number in range(5)]
    monkeypatch.setattr(discovery, "registered", discovery.Plugins())
    scans: list[None] = []

    def entry_points() -> Installed:
        scans.append(None)
        return installed

    monkeypatch.setattr(importlib_metadata, "entry_points", entry_points)
    assert call("tools", "--json") == 0
    assert len(scans) == 1


class Somewhere(Noting):
    """Notes things somewhere."""

    works_on = ("toy/*/eager",)


def test_where_tools_work_is_a_column_if_one_says_it(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.points += [point("noting", Noting), point("somewhere", Somewhere)]
    assert call("tools", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [tool["works_on"] for tool in found] == [[], ["toy/*/eager"]]
    assert call("tools") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert "works on" in head
    assert [row.split()[2:4] for row in rows[:2]] == [["all", "Notes"], ["toy", "eager"]]


def test_no_tools_at_all(installed: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("tools") == 0
    assert capsys.readouterr().err == "No tool is installed: pip install amanda-tools\n"
    assert call("tools", "--json") == 0
    assert capsys.readouterr().out == "[]\n"


def test_the_options_of_a_tool(installed: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    installed.points.append(point("noting", Noting))
    assert call("tools", "noting") == 0
    assert capsys.readouterr().out.splitlines() == [
        "noting",
        "",
        "Notes things.",
        "",
        "More of it.",
        "",
        "option  type            default",
        "count   a whole number  (required)",
        "depth   a number        0.5",
        "hook    a value         <built-in function print>",
        "sign    (in code only)  None",
    ]
    assert call("tools", "noting", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [option["name"] for option in found["options"]] == ["count", "depth", "hook", "sign"]
    assert found["options"][0] == {
        "name": "count",
        "type": "a whole number",
        "required": True,
        "default": None,
    }


def test_an_unknown_tool(installed: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    installed.points.append(point("noting", Noting))
    assert call("tools", "notin\x1b") == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: No tool 'notin\\x1b' is installed. Did you mean 'noting'?")
    assert error.endswith("[unknown-tool]\n")


# `amanda drivers`.


def test_drivers_are_listed_with_what_they_can_do(
    installed: Installed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = discovery.DRIVER_GROUP
    installed.points += [
        point("toy", ToyDriver(), group),
        Point("worse", broken, group, DISTRIBUTION),
        point("future", ToyDriver("later", api=99), group),
        point("off", ToyDriver("off"), group),
    ]
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", "off")
    assert call("drivers", "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    toy, worse, future, off = json.loads(out)
    assert toy == {
        "name": "toy",
        "status": "ok",
        "distribution": "amanda-driver-toy",
        "version": "0.4",
        "framework": "toy",
        "modules": ["toy"],
        "namespaces": ["toy/*/eager"],
        "capabilities": sorted(CAPABILITIES),
        "by_mode": {"eager": sorted(CAPABILITIES)},
        "framework_version": None,
        "interceptor": None,
        "why": None,
        "error": None,
    }
    assert (worse["status"], worse["framework"]) == ("broken", None)
    assert "ImportError: libtoy.so is missing" in worse["error"]
    assert "has driver API 99, but this core has" in future["error"]
    assert (off["status"], off["error"]) == ("blocked", None)
    assert call("drivers") == 0
    lines = capsys.readouterr().out.splitlines()
    toy_row = lines[1].split()
    assert toy_row[:2] == ["toy", "ok"]
    assert toy_row[-3:] == ["toy/*/eager", "amanda-driver-toy", "0.4"]


def test_capabilities_are_listed_by_mode(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    by_mode = {"eager": frozenset({"replace"}), "graph": frozenset({"staged"})}
    driver = ToyDriver(capabilities=by_mode)
    installed.points.append(point("toy", driver, discovery.DRIVER_GROUP))
    assert call("drivers", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["by_mode"] == {"eager": ["replace"], "graph": ["staged"]}


def test_no_drivers_at_all(installed: Installed, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("drivers") == 0
    assert capsys.readouterr().err == (
        "No driver is installed: pip install amanda-driver-<framework>\n"
    )


# What other people's metadata may hold.


@pytest.mark.untraced
@pytest.mark.parametrize(
    "damaged",
    [
        b"\xff\xfe garbage",
        pytest.param(b"[amanda.tools]\nno value\n", marks=pytest.mark.slow),
        pytest.param("[a]\nä = b".encode("latin-1"), marks=pytest.mark.slow),
    ],
)
def test_a_damaged_distribution_hides_no_other(tmp_path: Path, damaged: bytes) -> None:
    site = Site(tmp_path)
    distribution(site.path, "worse", "1.0", "")
    (site.path / "worse-1.0.dist-info/entry_points.txt").write_bytes(damaged)
    listed = site.amanda("tools", "--json")
    assert listed.returncode == 0
    assert "count" in [tool["name"] for tool in json.loads(listed.stdout)]
    assert "Skipped: the entry points of worse cannot be read" in listed.stderr
    site.write("train.py", "print('ran')")
    ran = site.run("train.py")
    assert (ran.returncode, ran.stdout) == (0, "ran\n")
    found = json.loads(site.amanda("doctor", "--json").stdout)["findings"]
    (message,) = (f["message"] for f in found if f["of"] == "python")
    assert message.startswith("Entry points cannot be read: worse: ")


def test_strange_entry_points_are_harmless(tmp_path: Path) -> None:
    site = Site(tmp_path)
    strange = "[amanda.tools]\n../x = os:system\n a b = 1 2 3\n= x\n\x1b[31m = y:z\n"
    distribution(site.path, "strange", "1.0\x1b[2J", f"{strange}[amanda.drivers]\nd = ../..:x\n")
    (site.path / "nameless-1.dist-info").mkdir()
    (site.path / "nameless-1.dist-info/entry_points.txt").write_text("[amanda.tools]\nn = m:T\n")
    for command in (["tools"], ["drivers"], ["doctor"], ["tools", "n"], ["tools", "a b"]):
        done = site.amanda(*command)
        assert "Traceback" not in done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert done.returncode == {"doctor": 1, "tools": 2 * (len(command) - 1)}.get(command[0], 0)


# Mistakes in how `run` is called: exit status 2, nothing runs, nothing is written.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "Name a script, or a module with -m."),
        (["run", "-t", "failing"], "Name a script, or a module with -m."),
        (["run", "--no-config", "--config", "x", "s.py"], "exclude one another"),
        (["run", "s.py"], "No tool is named. Name one with -t TOOL, or in [tool.amanda.tools]"),
        (["run", "-t", "nope", "s.py"], "No tool 'nope' is installed. Where: -t."),
        (["run", "-t", "failing:sparsty=1", "s.py"], "Did you mean 'sparsity'?"),
        (["run", "-t", "absent", "s.py"], "ModuleNotFoundError: No module named 'toytools_absent'"),
        (["run", "-t", "seven", "s.py"], "does not make an amanda.Tool but int"),
        (
            ["run", "-t", "failing", "--steps", "x", "s.py"],
            "'x' is not a range of steps. Where: --steps",
        ),
        (["run", "-t", "failing", "-o", "s.py/x", "s.py"], "is not a folder. Name another one"),
        (["run", "-t", "failing", "--config", "absent.toml", "s.py"], "Not a file"),
        (["run", "-t", "failing", "--nope", "s.py"], "No such option"),
        (["run", "-t", "../x", "s.py"], "'../x' is not the name of a tool"),
        (["run", "-t", "failing", "--drivers", "worse", "s.py"], "toyplugin_absent"),
        (["nope"], "No such command"),
    ],
)
def test_mistakes_on_the_command_line(site: Site, arguments: list[str], message: str) -> None:
    site.write("s.py", "print('it ran')")
    before = sorted(site.work.rglob("*"))
    done = site.amanda(*arguments, AMANDA_TOOLS="")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert sorted(site.work.rglob("*")) == before


def test_main_ends_by_system_exit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tools", "nope"])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["tools"])
    assert caught.value.code == 0


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
@pytest.mark.parametrize("width", [80, 100, 140])
def test_on_a_terminal_columns_that_matter_are_drawn(site: Site, width: int) -> None:
    pytest.importorskip("rich")
    for command, headings in (
        ("tools", ("tool", "status", "what it does")),
        ("drivers", ("driver", "status", "interceptor", "capabilities")),
        ("doctor", ("severity", "of", "finding", "fix")),
    ):
        drawn = drawn_by(site, command, width)
        head = next(line for line in drawn.splitlines() if line.startswith("┃"))
        shown = [cell.strip() for cell in head.strip("┃").split("┃")]
        assert set(headings) <= set(shown)
        assert all(len(line) <= width for line in drawn.splitlines())
        # The least important ones go first, as each table declares.
        if command == "drivers" and width < 140:
            assert "namespaces" not in shown
            assert "version" in shown
        if command == "tools":
            assert " ".join(cells(drawn, "toy-tools/count", shown.index("what it does"))) == (
                "Counts the executions of ops."
            )


def drawn_by(site: Site, command: str, width: int) -> str:
    """Return what a command shows on a terminal of this width, without colours."""
    leader, follower = os.openpty()
    command_line = [sys.executable, "-m", "amanda", command]
    environment = site.environment(COLUMNS=str(width))
    with subprocess.Popen(command_line, stdout=follower, env=environment, cwd=site.work):
        os.close(follower)
        drawn = b""
        with suppress(OSError):  # How Linux says that the terminal is closed.
            while part := os.read(leader, 100_000):
                drawn += part
    os.close(leader)
    return re.sub(r"\x1b\[[0-9;]*m", "", drawn.decode().replace("\r", ""))


def cells(drawn: str, name: str, column: int) -> list[str]:
    """Return the lines of a cell, in the row whose first cell is a name."""
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in drawn.splitlines()
        if line.startswith("│")
    ]
    first = next(number for number, row in enumerate(rows) if row[0] == name)
    found = [rows[first][column]]
    for row in rows[first + 1 :]:
        if row[0]:
            break
        found.append(row[column])
    return found


def test_the_exit_status_of_a_program_that_finds_no_driver(site: Site, tmp_path: Path) -> None:
    site.write("s.py", "print('it ran')")
    done = site.amanda("run", "-t", "failing", "s.py", AMANDA_DISABLE_PLUGINS="amanda-driver-toy,*")
    assert done.returncode == 2
    assert "is blocked by AMANDA_DISABLE_PLUGINS" in done.stderr
