"""Builds the distributions and looks at them in fresh environments: `nox -s packages`.

What a checkout cannot show: files that packaging forgets, requirements that are not declared, and
whether each distribution works without the others. Makes all that it needs in a temporary folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MEMBERS = ("amanda_core", "amanda_driver_tf", "amanda_driver_torch", "amanda_tools")
LEFT_BY_BUILDS = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
TRAIN = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
model(torch.ones(3, 4)).sum().backward()
print("trained")
"""


class Environment:
    """A fresh environment, in which our distributions are installed from their wheels."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        venv.create(folder, with_pip=True)
        self.folder, self.wheels = folder, wheels
        self.programs = folder / ("Scripts" if os.name == "nt" else "bin")
        self.work = folder / "work"
        self.work.mkdir()
        (self.work / "train.py").write_text(TRAIN)

    def run(self, program: str, *arguments: str, status: int = 0) -> str:
        """Run a program of the environment; returns what it says."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "AMANDA_", "RANK"))
        }
        print(f"$ {program} {' '.join(arguments)}", flush=True)
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.work,
            env=kept,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != status:
            raise SystemExit(f"{done.stdout}\nIt ended with {done.returncode}, not {status}")
        return done.stdout

    def install(self, *distributions: str) -> None:
        """Install distributions of ours, and see that what is installed fits together."""
        # By the wheels' paths: an index may have something else of these names.
        paths = [self._wheel(name) for name in distributions]
        constraints = str(ROOT / "constraints.txt")
        self.run("python", "-m", "pip", "install", "-q", "-c", constraints, *paths)
        self.run("python", "-m", "pip", "check")

    def _wheel(self, requirement: str) -> str:
        name, bracket, extra = requirement.partition("[")
        (path,) = self.wheels.glob(f"{name.replace('-', '_')}-*.whl")
        return f"{path}{bracket}{extra}"

    def uninstall(self, *distributions: str) -> None:
        """Take distributions away."""
        self.run("python", "-m", "pip", "uninstall", "-q", "-y", *distributions)

    def json(self, *arguments: str, status: int = 0) -> Any:
        """What a command of `amanda` says for programs to read."""
        return json.loads(self.run("amanda", *arguments, "--json", status=status))

    def names(self, command: str) -> list[str]:
        """Names of the drivers or tools that are listed as usable."""
        return sorted(found["name"] for found in self.json(command) if found["status"] == "ok")


def main() -> None:
    """Build, then go through the environments."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        wheels = root / "wheels"
        sources = [
            Path(shutil.copytree(ROOT / member, root / "sources" / member, ignore=LEFT_BY_BUILDS))
            for member in MEMBERS
        ]
        scaffolded = list(scaffolds(root))
        for source in [*sources, *scaffolded]:
            build(source, wheels)
        for wheel in wheels.iterdir():
            holds_what_it_should(wheel)
        of_core(Environment(root / "core", wheels), scaffolded[1])
        of_torch(Environment(root / "torch", wheels), scaffolded[0])
    print("All well.")


def scaffolds(root: Path) -> Iterator[Path]:
    """A tool and a driver as `amanda new` makes them."""
    for kind in ("tool", "driver"):
        command = [sys.executable, "-m", "amanda", "new", kind, "mine", "-o", str(root)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield root / f"amanda-{kind}-mine"


def build(source: Path, wheels: Path) -> None:
    """Build a source distribution, and a wheel from that."""
    print(f"Building {source.name}", flush=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(wheels), str(source)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
    )


def holds_what_it_should(wheel: Path) -> None:
    """See that a wheel has a type marker and no tests."""
    if wheel.suffix == ".whl":
        names = zipfile.ZipFile(wheel).namelist()
        assert any(name.endswith("/py.typed") for name in names), wheel
        assert not [name for name in names if name.startswith("tests/")], wheel


def of_core(environment: Environment, driver: Path) -> None:
    """The core alone, then with a driver that `amanda new` made."""
    environment.install("amanda-core")
    said = environment.run("amanda", "tools", status=1)
    assert 'pip install "amanda-core[cli]"' in said, said
    environment.install("amanda-core[cli]")
    assert environment.json("drivers") == environment.json("tools") == []
    assert "pip install amanda-driver-<framework>" in environment.run("amanda", "drivers")
    assert "pip install amanda-tools" in environment.run("amanda", "tools")
    said = environment.run("amanda", "run", "-t", "trace", "train.py", status=2)
    assert "No tool 'trace' is installed" in said, said
    assert "pip install amanda-tools" in said, said
    apply = "import amanda\nwith amanda.apply(amanda.Tool()): pass"
    said = environment.run("python", "-c", apply, status=1)
    assert "No working driver is installed" in said, said
    assert "pip install amanda-driver-<framework>" in said, said
    assert environment.json("doctor", status=1)["findings"][0]["severity"] == "error"

    environment.install("amanda-driver-mine[test]")
    assert environment.names("drivers") == ["mine"]
    environment.run("python", "-m", "pytest", "-q", str(driver))
    environment.run("python", "-c", apply)
    environment.uninstall("amanda-driver-mine")
    assert environment.names("drivers") == []


def of_torch(environment: Environment, tool: Path) -> None:
    """The core with PyTorch's driver, tools that come and go, and at last without the driver."""
    environment.install("amanda-core[cli]", "amanda-driver-torch")
    assert environment.names("drivers") == ["pytorch"]
    own = (
        "import amanda, torch\nseen = []\ntool = amanda.Tool()\n"
        "tool.add_inst_for_op(lambda context: seen.append(context['type']))\n"
        "with amanda.apply(tool): torch.relu(torch.ones(2))\nassert seen[-1] == 'relu', seen\n"
    )
    environment.run("python", "-c", own)
    said = environment.run("python", "-c", "import amanda; amanda.tools", status=1)
    assert "pip install amanda-tools" in said, said

    environment.install("amanda-tool-mine[test]", "amanda-tools")
    assert environment.names("tools") == ["mapping", "mine", "prune", "trace"]
    assert {found["severity"] for found in environment.json("doctor")["findings"]} <= {"info"}
    said = environment.run("python", "-m", "pytest", "-q", str(tool))
    assert "skipped" not in said, said
    both = ["amanda", "run", "-t", "mine", "-t", "prune:sparsity=0.5", "-o"]
    said = environment.run(*both, "both", "train.py")
    assert "trained" in said, said
    assert sorted(path.name for path in (environment.work / "both").iterdir()) == [
        "mine.json",
        "prune.json",
    ]

    environment.uninstall("amanda-tools")
    assert environment.names("tools") == ["mine"]
    environment.run("amanda", "run", "-t", "mine", "-o", "one", "train.py")
    calls = json.loads((environment.work / "one/mine.json").read_text())["calls"]
    assert calls["0/linear"] == 1, calls
    environment.uninstall("amanda-tool-mine")
    assert environment.names("tools") == []
    environment.run("python", "-c", own)
    environment.uninstall("amanda-driver-torch")
    said = environment.run("python", "-c", own, status=1)
    assert "No working driver is installed" in said, said
    environment.run("python", "-m", "pip", "check")


if __name__ == "__main__":
    main()
