"""The walk over README and guides sees what a person at a terminal sees."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # `maintenance` lies in the root, which `-P` hides.

pytest.importorskip("pyte", reason="the group `walk` installs it")

from maintenance.walk import __main__ as walk, pages, terminal

pytestmark = pytest.mark.one_interceptor


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[terminal.Terminal]:
    variables = {"PATH": os.environ["PATH"], "PS1": terminal.PROMPT.format("$?"), "TERM": "xterm"}
    made = terminal.Terminal(["/bin/bash", "--norc", "--noediting"], tmp_path, variables, 20)
    yield made
    made.close()


def test_a_screen_has_the_width_of_the_terminal_and_the_status(shell: terminal.Terminal) -> None:
    screen = shell.type("stty size; false")
    assert (screen.status, screen.rows, screen.cut) == (1, ["40 20"], [])
    # A line that is written over is not seen, and a long one continues below.
    screen = shell.type(r"printf 'half\rwhole\n%025d\n' 7")
    assert screen.rows == ["whole", "0" * 20, "00007"]
    assert (screen.status, screen.cut) == (0, [])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("│ a │ b               │", "a table is wider"),
        ("one and two and three and four\\rdone", "progress is wider"),
        ("a cell of a tab…", "cut short"),
        ("  run  Run a progr...", "cut short"),
    ],
)
def test_what_is_cut_is_found(shell: terminal.Terminal, text: str, what: str) -> None:
    (found,) = shell.type(rf"printf '{text}\n'").cut
    assert found.startswith(what)


def test_an_error_that_a_pipe_hides_is_a_problem(shell: terminal.Terminal, tmp_path: Path) -> None:
    (tmp_path / "amanda").mkdir()  # As if it were cloned.
    new = walk.Walk(tmp_path, 20)
    for command in ("echo well | sort", "echo 'Error: no' | sort", "echo 'Error: no'; false"):
        new.type_line(shell, command, command, "a page")
    assert new.problems == [
        "a page: echo 'Error: no' | sort shows an error",
        "a page: echo 'Error: no'; false ended with 1",
    ]


def test_a_program_that_does_not_end_is_an_error(shell: terminal.Terminal) -> None:
    with pytest.raises(TimeoutError, match="No prompt after 1 s"):
        shell.type("echo begun; cat", seconds=1)


def test_the_pages_have_commands_and_what_is_skipped_is_on_one() -> None:
    names = ["README.md", *(f"docs/{page}" for page in walk.PAGES[1:])]
    found = {
        name: [line for block in pages.blocks(pages.ROOT / name) for line in walk.typed(block)]
        for name in names
    }
    assert found["docs/guides/publishing-a-tool.md"][:2] == [
        "amanda new tool op-report",
        'cd amanda-tool-op-report && pip install -e ".[test]" && pytest',
    ]
    assert found["README.md"][0] == "pip install 'amanda-dnn[torch]'"
    assert walk.BEFORE.keys() <= found.keys()
