"""An installation for the tests of the command line: a folder for PYTHONPATH.

It has the toy framework (`toyframe`), a driver that does not import it, and distributions with
tools. Only their metadata makes them installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amanda_core.testing.toy import framework as toy

#: The toy framework, which is copied into the installation so that pytest is not needed.
TOY = Path(toy.__file__).parent

PLUGIN = """
import sys
from amanda_core import DriverInfo, Finding, hookimpl

_driver = None

@hookimpl
def amanda_driver_info():
    return DriverInfo("toy", ("toyframe",), ("toy/*/eager",), frozenset({"gradients"}), api=3)

@hookimpl
def amanda_preflight():
    return [Finding("warning", "The toy framework is a toy", "Use a real one")]

@hookimpl
def amanda_attach(session):
    global _driver
    if "toyframe" not in sys.modules:
        return None
    if _driver is None:
        from toyland.driver import ToyDriver
        _driver = ToyDriver()
    return _driver.amanda_attach(session)
"""

FRAME = """
from toyland import framework as toy
from toyland.framework import Value, add, mul, relu, scope

def update(*values):  # Looked up late: the driver replaces it.
    toy.update(*values)
"""

TOOLS = '''
import json
import os
from enum import Enum
from pathlib import Path
from typing import Literal

import amanda
from amanda_core.results import Table


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


class Found:
    def __init__(self, tool):
        self.tool = tool

    def table(self):
        return Table("", ("op", "calls"), sorted(self.tool.calls.items()))

    def to_json(self):
        return json.dumps(
            {"calls": self.tool.calls, "options": self.tool.options}, default=str
        )

    def write(self, folder):
        if self.tool.escape == "link":
            (folder / "link.txt").symlink_to("/etc/hostname")
            return [folder / "link.txt"]
        if self.tool.escape:
            path = folder / self.tool.escape
            path.write_text("escaped")
            return [path]
        return []


class Counter(amanda.Tool):
    """Counts the executions of ops.

    More of it.
    """

    def __init__(
        self,
        label: str = "",
        sparsity: float = 0.5,
        rounds: int | None = None,
        exact: bool = False,
        where: Path | None = None,
        norm: Literal["l1", "l2"] = "l1",
        mode: Mode = Mode.FAST,
        layers: list[int] = [],
        escape: str = "",
        hook=print,
    ):
        self.options = {k: v for k, v in locals().items() if k not in ("self", "hook", "escape")}
        self.escape = escape
        self.calls = {}
        if sparsity > 1:
            raise ValueError("sparsity is a fraction")
        self.add_inst_for_op(self.analyse)

    def analyse(self, context):
        context.insert_after_op(self.count, name=context.name)

    def count(self, *values, name):
        self.calls[name] = self.calls.get(name, 0) + 1

    def result(self):
        return Found(self)


class Silent(amanda.Tool):
    result = "not a method"

    def __init__(self, needed: int):
        pass


class Failing(Counter):
    def result(self):
        raise RuntimeError("no result today")


def no_tool():
    return 7


not_callable = 7
'''

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def distribution(site: Path, name: str, version: str, entry_points: str) -> None:
    """Write the metadata that makes a distribution installed."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA.format(name=name, version=version))
    (folder / "entry_points.txt").write_text(entry_points)


class Site:
    """An installation, a working folder, and programs that run in it."""

    def __init__(self, root: Path) -> None:
        self.path = root / "site"
        self.work = root / "work"
        self.path.mkdir()
        self.work.mkdir()
        land = self.path / "toyland"
        land.mkdir()
        (land / "__init__.py").write_text("")
        for name in ("framework.py", "driver.py", "driver.toml"):
            text = (TOY / name).read_text()
            (land / name).write_text(
                text.replace("from amanda_core.testing.toy import", "from . import")
            )
        (self.path / "toyframe.py").write_text(FRAME)
        (self.path / "toyplugin.py").write_text(PLUGIN)
        (self.path / "toytools.py").write_text(TOOLS)
        distribution(self.path, "amanda-driver-toy", "0.4", "[amanda.drivers]\ntoy = toyplugin\n")
        distribution(
            self.path,
            "toy-tools",
            "1.5",
            "[amanda.tools]\ncount = toytools:Counter\nsilent = toytools:Silent\n"
            "failing = toytools:Failing\nseven = toytools:no_tool\nnumber = toytools:not_callable\n"
            "absent = toytools_absent:Counter\n",
        )

    def write(self, name: str, text: str) -> Path:
        """Write a file into the working folder."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def environment(self, **variables: str) -> dict[str, str]:
        """Return environment variables with this installation and without other drivers."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AMANDA_", "RANK", "PYTHON"))
        }
        path = os.pathsep.join([str(self.path), *filter(None, [os.environ.get("PYTHONPATH", "")])])
        return {**kept, "PYTHONPATH": path, "AMANDA_DISABLE_PLUGINS": OTHERS, **variables}

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start Python with these arguments."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.work,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def python(
        self, *arguments: str, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.work,
            env=self.environment(**variables),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def amanda(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the program `amanda`."""
        return self.python("-m", "amanda", *arguments, **options)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program under the tool that counts."""
        return self.amanda("run", "-t", "count", "-o", "out", *arguments, **options)


def with_plugins(path: Sequence[str] = sys.path) -> str:
    """Return the names of the distributions on `path` that have plugins, with commas between."""
    found = importlib.metadata.distributions(path=list(path))
    return ",".join(
        sorted(
            {
                distribution.metadata["Name"]
                for distribution in found
                if any(point.group.startswith("amanda.") for point in distribution.entry_points)
            }
        )
    )


#: What is installed beside, and would make the tests depend on it.
OTHERS = with_plugins()


def lines(text: str) -> Sequence[str]:
    """Return the lines of an output without Amanda's own."""
    return [line for line in text.splitlines() if not line.startswith("amanda: ")]
