"""The commands of the skill `debug-numerics`, in its order, name the operator of planted bugs.

Of twenty bugs eighteen have to be named, by the line at which the numbers go wrong, and each
command may print at most 4,000 tokens, which is 16,000 characters. The right programs have no bug.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numeric_bugs
import pytest
from numeric_bugs import ALONE, WITH_REFERENCE, bug_line

pytestmark = [pytest.mark.one_interceptor, pytest.mark.untraced]
ROOT = Path(__file__).resolve().parents[2]
SKILL = (ROOT / "skills/debug-numerics/SKILL.md").read_text("utf-8")
PROGRAM = str(numeric_bugs.__file__)
CHARACTERS = 16_000
EVERY = [*ALONE, *WITH_REFERENCE]


class Commands:
    """Runs commands of the skill in a folder, and checks how much each prints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, shown: str, *arguments: str, wrong: bool = False) -> str:
        """Run a command that the skill shows in these words, with the arguments of a program."""
        assert shown in SKILL
        command = shown.replace("train.py", PROGRAM).split()[1:]
        done = subprocess.run(
            [sys.executable, "-m", "amanda", *command, *arguments],
            cwd=self.folder,
            env={k: v for k, v in os.environ.items() if not k.startswith("AMANDA_")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 or (wrong and done.returncode in (1, 2)), done.stderr
        assert len(done.stdout) + len(done.stderr) < CHARACTERS
        return done.stdout


def named(name: str, folder: Path, broken: bool = True) -> str | None:
    """Return the source of the first operator that a step of the skill names, or None."""
    commands, right = Commands(folder), [] if broken else ["right"]
    commands.run("amanda run -q -t nonfinite -o nan train.py", name, *right)
    shown = commands.run("amanda show nan/nonfinite.json --part faults --json --limit 3")
    if faults := json.loads(shown):
        return str(faults[0]["source"])
    if name in ALONE:
        return None
    commands.run("amanda run -q -t fingerprint -o a train.py", name, *right)
    commands.run("amanda run -q -t fingerprint -o c train.py", name, "right")
    found = json.loads(commands.run("amanda diff a c --json --limit 2", wrong=True))
    return None if found["first"] is None else str(found["first"]["source"])


def is_right(name: str, source: str | None) -> bool:
    return source == f"{Path(PROGRAM).name}:{bug_line(name)}"


@pytest.mark.parametrize("name", ["logarithm_of_a_probability"])
def test_a_bug_is_named(name: str, tmp_path: Path) -> None:
    assert is_right(name, named(name, tmp_path))


@pytest.mark.slow
def test_of_twenty_bugs_at_least_eighteen_are_named(tmp_path: Path) -> None:
    found = {}
    for name in EVERY:
        (folder := tmp_path / name).mkdir()
        found[name] = named(name, folder)
    missed = {name: source for name, source in found.items() if not is_right(name, source)}
    assert len(found) == 20
    assert len(missed) <= 2, missed


@pytest.mark.slow
def test_programs_without_a_bug_have_none(tmp_path: Path) -> None:
    for name in EVERY[::5]:
        (folder := tmp_path / name).mkdir()
        assert named(name, folder, broken=False) is None
