"""Do what README and the guides print, in order, as a new user does: `nox -s walk`.

Clones the repository, builds its distributions, and in a fresh environment types each command on a
terminal of 100 columns, in one folder for each page. Python blocks of a page are typed into one
interpreter. It fails if a step fails, a traceback or an error is shown, or something is cut or left
out that may not be. All screens are written to a file, to be looked at. ``-- README.md
docs/tutorial.md`` walks over these pages only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

from amanda_core.cli.doctor import DROP as OF_DOCTOR
from amanda_core.cli.drivers import DROP as OF_DRIVERS
from amanda_core.cli.tools import DROP as OF_TOOLS

from .pages import ROOT, Block, blocks, commands
from .terminal import PROMPT, Screen, Terminal

#: In the order of the site's navigation.
PAGES = re.findall(
    r"- ((?:README|install|tutorial|gallery|guides/\S+)\.md)",
    (ROOT / "mkdocs.yml").read_text("utf-8"),
)
#: What a person types first.
FIRST = ("amanda --help", "amanda tools", "amanda drivers", "amanda doctor")
#: The columns that a listing may leave out on a narrow terminal, by its own declaration.
DROPPED: Mapping[str, tuple[str, ...]] = {
    "amanda tools": OF_TOOLS,
    "amanda drivers": OF_DRIVERS,
    "amanda doctor": OF_DOCTOR,
}
#: What a page takes to be there: a program of the reader's, or names that its blocks use.
BEFORE = {
    "README.md": """\
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
batch = torch.randn(32, 8)
""",
}
TRAIN = """\
import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(int(sys.argv[2]) if sys.argv[1:2] == ["--epochs"] else 1):
    for batch in range(20):
        x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    print("epoch", epoch)
"""
#: Commands that are not typed, and why.
SKIPPED = {
    r".*-m nox -s tests\b": "the tests, which take minutes and have runs of their own",
    r".*-m\s+nox -s\s*(demo|$)": "the demo, which has an environment of its own",
    r".*amanda_driver_mxnet": "MXNet, which needs an older NumPy",
    r".*amanda_driver_mindspore": "MindSpore, which needs an older NumPy, and 2.5 GB",
}
#: Reads names of files, and executes them one after the other.
INTERPRETER = f"""
import sys, traceback
names, status = {{"__name__": "__main__"}}, 0
while True:
    path = input({PROMPT!r}.format(status))
    try:
        exec(compile(open(path).read(), path, "exec"), names)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
"""


def main(arguments: list[str]) -> int:
    """Walk over the pages; print what is wrong and return 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.walk")
    parser.add_argument("pages", nargs="*", help="pages, relative to the root; by default, all")
    parser.add_argument("--columns", type=int, default=100, help="width of the terminal")
    parser.add_argument("--folder", type=Path, help="where to work; an environment there is kept")
    options = parser.parse_args(arguments)
    names = options.pages or ["README.md", *(f"docs/{page}" for page in PAGES[1:])]
    with tempfile.TemporaryDirectory() as temporary:
        walk = Walk(options.folder or Path(temporary), options.columns)
        for name in names:
            walk.over(name)
    print(f"{walk.typed} steps of {len(names)} pages, {len(walk.problems)} problems")
    return 1 if walk.problems else 0


class Walk:
    """A new user, with a clone, an environment and a terminal."""

    def __init__(self, folder: Path, columns: int) -> None:
        self.folder = folder.resolve()
        self.columns = columns
        self.problems: list[str] = []
        self.typed = 0
        self.clone, self.environment = self.folder / "amanda", self.folder / "environment"
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "AMANDA_", "RANK", "VIRTUAL_ENV", "COLUMNS"))
        }
        programs = str(self.environment / "bin")
        self.variables = {
            **kept,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(self.clone / "constraints.txt"),
            "PIP_FIND_LINKS": f"{os.environ.get('PIP_FIND_LINKS', '')} {self.folder / 'wheels'}",
            "TERM": "xterm-256color",
            "PS1": PROMPT.format("$?"),
        }
        if not self.clone.exists():
            self._prepare()

    def _prepare(self) -> None:
        subprocess.run(["git", "clone", "-q", str(ROOT), str(self.clone)], check=True)
        venv.create(self.environment, with_pip=True)
        # As an index would have them.
        members = sorted(str(path.parent) for path in self.clone.glob("*/pyproject.toml"))
        pip = [str(self.environment / "bin/python"), "-m", "pip", "wheel", "-q", "--no-deps"]
        command = [*pip, "-w", str(self.folder / "wheels"), *members]
        subprocess.run(command, check=True, env=self.variables)

    def over(self, name: str) -> None:
        """Do what a page prints, in a new folder."""
        print(name, flush=True)
        work = Path(tempfile.mkdtemp(prefix=f"{Path(name).stem}-", dir=self.folder))
        (work / "train.py").write_text(TRAIN)
        shell = Terminal(["/bin/bash", "--norc", "--noediting"], work, self.variables, self.columns)
        python: Terminal | None = None
        try:
            for number, block in enumerate(blocks(self.clone / name)):
                where = f"{name}:{block.line}"
                if block.file is not None:
                    (work / block.file).write_text(block.text)
                elif block.language == "python":
                    if python is None:
                        program = [str(self.environment / "bin/python"), "-uc", INTERPRETER]
                        python = Terminal(program, work, self.variables, self.columns)
                        if name in BEFORE:
                            self.type_line(
                                python, "before", self._file(name, 0, BEFORE[name]), where
                            )
                    path = self._file(name, block.line, "\n" * (block.line - 1) + block.text)
                    self.type_line(python, block.text, path, where)
                else:
                    for command in typed(block):
                        self._command(shell, command, where)
                if name == "README.md" and number == 0:
                    for command in FIRST:
                        self._command(shell, command, "at first")
        finally:
            shell.close()
            if python is not None:
                python.close()

    def _file(self, name: str, line: int, text: str) -> str:
        path = self.folder / "blocks" / f"{Path(name).stem}-{line}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    def _command(self, shell: Terminal, command: str, where: str) -> None:
        for pattern, why in SKIPPED.items():
            if re.match(pattern, command):
                print(f"  not typed: {command}: {why}")
                return
        # What names a member of the checkout is typed there.
        there = f"(cd {self.clone} && {command})" if "./amanda_" in command else command
        screen = self.type_line(shell, command, there, where)
        for row in screen.rows:
            if row.startswith("Not shown, as they do not fit: "):
                hidden = row.partition(": ")[2].split(", ")
                for column in sorted(set(hidden) - set(DROPPED.get(command, hidden))):
                    self._wrong(f"{where}: {command}: the column {column} is missing")

    def type_line(self, terminal: Terminal, shown: str, line: str, where: str) -> Screen:
        """Type a line into a terminal, and note what is wrong with what it shows.

        Args:
            terminal: The terminal.
            shown: The line as its page has it.
            line: The line.
            where: The page.
        """
        screen = terminal.type(line)
        self.typed += 1
        with (self.folder / "screens.txt").open("a", encoding="utf-8") as file:
            file.write(f"\n===== {where} ({screen.status})\n$ {shown}\n")
            file.writelines(f"{row}\n" for row in screen.rows)
        where = f"{where}: {shown.strip().splitlines()[0]}"
        if screen.status:
            self._wrong(f"{where} ended with {screen.status}")
        if any("Traceback (most recent call last)" in row for row in screen.rows):
            self._wrong(f"{where} shows a traceback")
        # In a pipe, the status is that of the last program.
        if not screen.status and any(row.startswith("Error: ") for row in screen.rows):
            self._wrong(f"{where} shows an error")
        for text in screen.cut:
            self._wrong(f"{where}: {text}")
        return screen

    def _wrong(self, problem: str) -> None:
        print(f"  {problem}", flush=True)
        self.problems.append(problem)


def typed(block: Block) -> Iterator[str]:
    """Yield the commands of a block of a shell."""
    if block.language == "console":
        yield from (command for command, _ in commands(block))
    elif block.language in ("", "sh"):
        for line in block.text.splitlines():
            command = line.partition("  #")[0].strip()
            if command:
                yield command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
