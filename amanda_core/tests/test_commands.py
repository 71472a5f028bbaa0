"""Commands of other distributions: listed, run, and harmless where they are broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from amanda_core.cli import app
from amanda_core.plugins.installed import COMMAND_GROUP

from .conftest import Installed
from .making import DISTRIBUTION, Point

OTHERS = SimpleNamespace(name="other-commands", version="2.0")
SHIPPED = SimpleNamespace(name="amanda_tools", version="0.1")


@click.command()
@click.argument("number", type=int)
def twice(number: int) -> int:
    """Print a number doubled."""
    click.echo(2 * number)
    return number


def point(load: Callable[[], Any], name: str = "twice", dist: Any = DISTRIBUTION) -> Point:
    return Point(name, load, COMMAND_GROUP, dist)


def call(*arguments: str) -> int:
    outcome = app.parse(arguments)
    assert isinstance(outcome, int)
    return outcome


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the commands in the help, each with its description."""
    assert call("--help") == 0
    lines = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    parts = (line.strip().partition(" ") for line in lines)
    return {name: said.strip() for name, _, said in parts if name}


def exits() -> Any:
    raise SystemExit("not on this machine")


def breaks() -> Any:
    raise ImportError("libcommand.so is missing")


class Unspeakable(click.Command):
    def get_short_help_str(self, limit: int = 45) -> str:
        raise RuntimeError("no words")


def test_a_command_is_listed_and_run(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.points.append(point(lambda: twice))
    commands = listed(capsys)
    assert commands["twice"] == "Print a number doubled."
    assert list(commands)[-1] == "twice"  # Behind our own.
    assert call("twice", "21") == 21
    assert capsys.readouterr().out == "42\n"
    assert call("twice", "many") == 2
    assert "'many' is not a valid integer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (exits, "SystemExit"),
        (breaks, "libcommand.so is missing"),
        (lambda: 7, "int is not a click.Command"),
        (lambda: Unspeakable("twice"), "no words"),
    ],
)
def test_one_that_does_not_work_ends_nothing(
    installed: Installed,
    capsys: pytest.CaptureFixture[str],
    load: Callable[[], Any],
    said: str,
) -> None:
    installed.points.append(point(load))
    commands = listed(capsys)
    assert {"run", "tools", "doctor"} <= set(commands)
    assert commands["twice"].startswith("(broken: ")
    assert call("twice", "--whatever", "1") == 2
    assert said in capsys.readouterr().err
    # Others do not look at it.
    assert call("tools") == 0
    capsys.readouterr()
    assert call("doctor", "--json") == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (message,) = (found["message"] for found in findings if found["of"] == "twice")
    assert said in message


def test_a_blocked_one_is_not_imported(
    installed: Installed,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    blocked = point(lambda: twice)
    installed.points.append(blocked)
    with monkeypatch.context() as patch:
        patch.setenv("AMANDA_DISABLE_PLUGINS", "twice")
        assert listed(capsys)["twice"] == "(blocked by AMANDA_DISABLE_PLUGINS)"
        assert call("twice", "1") == 2
        assert "blocked by AMANDA_DISABLE_PLUGINS" in capsys.readouterr().err
        assert call("doctor", "--json") in (0, 1)
        assert "blocks nothing" not in capsys.readouterr().out
    # As by the configuration; nor where that cannot be read.
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text("[tool.amanda]\ndisable_plugins = 7\n")
    assert call("twice", "1") == 2
    assert "not imported" in capsys.readouterr().err
    name = DISTRIBUTION.name
    Path("pyproject.toml").write_text(f"[tool.amanda]\ndisable_plugins = ['{name}']\n")
    assert call("twice", "1") == 2
    assert "blocked by" in capsys.readouterr().err
    assert blocked.loads == 0


def test_names_of_two_distributions(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def other() -> None:
        """Fail if it is run."""

    # One's own are always those of Amanda.
    installed.points += [point(lambda: other, "tools"), point(lambda: twice)]
    assert "List the installed tools" in listed(capsys)["tools"]
    installed.points.append(point(lambda: other, dist=OTHERS))
    assert call("twice", "1") == 2
    said = capsys.readouterr().err
    assert "several distributions" in said
    assert "other-commands 2.0" in said
    installed.points.append(point(lambda: twice, dist=SHIPPED))
    assert call("twice", "1") == 1


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("twise") == 2
    said = capsys.readouterr().err
    assert "No such command 'twise'" in said
    assert "amanda-tools" in said


def test_what_a_command_returns_is_a_status_if_it_is_a_number(installed: Installed) -> None:
    @click.command()
    def chatty() -> str:
        """Return something that is not a number."""
        return "done"

    installed.points.append(point(lambda: chatty, "chatty"))
    assert call("chatty") == 0
