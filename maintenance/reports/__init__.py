"""Reports of users of other tools, each as a small program that is run under a tool of ours.

`programs` has them: the head of each names the report, the command and what is right. `__main__`
runs them and writes docs/reports.md.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import shlex
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amanda_core.cli import app

__all__ = ["PROGRAMS", "Outcome", "Report", "reports"]

PROGRAMS = Path(__file__).with_name("programs")
#: The folder of results, which each command of the page leaves to its default.
_OUT = "out"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program printed and left.

    Attributes:
        shown: What was found in place of what is right.
        right: Whether it is that.
    """

    shown: str
    right: bool


@dataclass(frozen=True, slots=True)
class Report:
    """A report and its program.

    Attributes:
        need: What the author of the report wants.
        url: The report.
        command: What is typed.
        right: An expression of Python over the results, by the names of the tools.
        path: The program.
    """

    need: str
    url: str
    command: str
    right: str
    path: Path

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read the head of a program."""
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        need, _, rest = text.partition("\n\n")
        fields = dict(line.split(": ", 1) for line in rest.splitlines())
        return cls(need, fields["Report"], fields["Command"], fields["Right"], path)

    def run(self) -> Outcome:
        """Run the command in this process, and compare its results with what is right."""
        words = shlex.split(self.command)[2:]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, _OUT)
            words[-1:] = ["-q", "-o", str(out), str(self.path)]
            printed, told = io.StringIO(), io.StringIO()
            # As where it is typed: tests make errors of warnings.
            with (
                warnings.catch_warnings(),
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(told),
            ):
                warnings.simplefilter("default")
                ready = app.parse(["run", "--no-config", *words])
                status = ready() if callable(ready) else ready
            if status:
                return Outcome(f"ends with status {status}: {told.getvalue().strip()}", False)
            return self._compare(out, printed.getvalue())

    def _compare(self, out: Path, printed: str) -> Outcome:
        def values(name: str) -> Sequence[Any]:
            return _captured(out / name)

        names = {file.stem: json.loads(file.read_text("utf-8")) for file in out.glob("*.json")}
        names |= {"values": values, "printed": printed}
        try:
            right = bool(eval(self.right, names))
            compared = ast.parse(self.right, mode="eval").body
            shown = compared.left if isinstance(compared, ast.Compare) else compared
            found = eval(ast.unparse(shown), names)
        except Exception as error:
            return Outcome(f"{type(error).__name__}: {error}", False)
        return Outcome(repr(found), right)


def reports() -> list[Report]:
    """Return all reports, by the names of their programs."""
    return [Report.read(path) for path in sorted(PROGRAMS.glob("*.py"))]


def _captured(folder: Path) -> list[Any]:
    """Return the arrays that `capture` kept, in the order of the executions."""
    from safetensors.numpy import load_file

    content = json.loads((folder / "index.json").read_text("utf-8"))
    files: dict[str, dict[str, Any]] = {}
    found = []
    for value in content["values"]:
        if value["file"] not in files:
            files[value["file"]] = load_file(folder / value["file"])
        found.append(files[value["file"]][value["key"]])
    return found
