"""`amanda run --show-config`: the settings that hold, and where each comes from."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from amanda_core.cli import app

FILE = """
[tool.amanda]
output = "results"
disable_plugins = ["a", "b"]
select = { steps = "0:5" }

[tool.amanda.tools.prune]
sparsity = 0.5
exact = true
select = { ops = ["linear", "conv*"] }

[tool.amanda.tools.all]
tool = "trace"
enable = false
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text(FILE)
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    for name in ("AMANDA_TOOLS", "AMANDA_OUTPUT", "AMANDA_DRIVERS", "AMANDA_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    assert app.parse(["run", *arguments]) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["setting", "value", "said", "by"]
    return [re.split(r"\s{2,}", row) for row in rows]


def test_each_setting_is_shown_with_what_says_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_DRIVERS", "pytorch")
    monkeypatch.setenv("AMANDA_DISABLE_PLUGINS", "c")
    file = folder / "pyproject.toml"
    arguments = ["-t", "prune:sparsity=0.9", "--modules", "encoder.*", "--show-config", "train.py"]
    assert shown(capsys, *arguments) == [
        ["output", str(folder / "results"), f"{file}:3"],
        ["drivers", "pytorch", "AMANDA_DRIVERS"],
        ["disable_plugins", "a, b", f"{file}:4"],
        ["disable_plugins", "c", "AMANDA_DISABLE_PLUGINS"],
        ["tools.prune", "prune", "-t"],
        ["tools.prune.sparsity", "0.9", "-t"],
        ["tools.prune.exact", "true", f"{file}:9"],
        ["tools.prune.select.ops", "linear, conv*", f"{file}:10"],
        ["tools.prune.select.modules", "encoder.*", "--ops, --modules, --steps, --calls"],
        ["tools.prune.select.steps", "0:5", f"{file}:5"],
        ["tools.all", "trace (does not run)", f"{file}:12"],
    ]
    assert not (folder / "results").exists()


def test_without_a_script_it_is_the_configuration_of_the_current_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.parse(["run", "--show-config"]) == 0
    assert capsys.readouterr().out.startswith(f"Configuration: {folder / 'pyproject.toml'}\n")
    assert app.parse(["run", "--show-config", "--no-config"]) == 0
    assert capsys.readouterr().out == textwrap.dedent(
        """\
        Configuration: no file
        setting  value                          said by
        output   amanda_results (a new folder)  default
        drivers  all                            default
        """
    )


def test_that_no_driver_is_wanted_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "pyproject.toml").write_text("[tool.amanda]\ndrivers = []\n")
    assert ["drivers", "none", f"{folder / 'pyproject.toml'}:2"] in shown(capsys, "--show-config")


def test_a_mistake_is_told_as_in_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pyproject.toml").write_text("[tool.amanda]\noutputs = 'x'\n")
    assert app.parse(["run", "--show-config", "train.py"]) == 2
    assert "Unknown key 'outputs'" in capsys.readouterr().err
