"""Distributions as users get them: built, and installed into environments of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Environment", "build"]

ROOT = Path(__file__).parents[2]
#: A line of a script that installs distributions by their names.
_PIP_INSTALL = re.compile(r"^(?P<pip>\S*pip install) (?P<what>[^-\n].*)$", re.MULTILINE)
LEFT_BY_BUILDS = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")


def build(source: Path, into: Path) -> None:
    """Build a source distribution of a folder, and a wheel from it."""
    print(f"Building {source.name}", flush=True)
    # setuptools builds in the source tree and takes what an earlier build left there.
    copy = shutil.copytree(source, into / "sources" / source.name, ignore=LEFT_BY_BUILDS)
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(into), str(copy)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
    )


class Environment:
    """A fresh environment into which distributions are installed from their wheels.

    Args:
        folder: Folder to create; must not exist.
        wheels: Folder of the wheels that `build` made.
    """

    def __init__(self, folder: Path, wheels: Path) -> None:
        venv.create(folder, with_pip=True)
        self.folder, self.wheels = folder, wheels
        self.programs = folder / ("Scripts" if os.name == "nt" else "bin")
        self.work = folder / "work"
        self.work.mkdir()

    def run(self, program: str, *arguments: str, status: int = 0) -> str:
        """Run a program of the environment outside the repository and return its output."""
        # Variables of the caller's would bring his packages in.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "AMANDA_", "RANK"))
        }
        print(f"$ {program} {' '.join(arguments)}", flush=True)
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.work,
            env={**kept, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != status:
            raise SystemExit(f"{done.stdout}\nIt ended with {done.returncode}, not {status}")
        return done.stdout

    def shell(self, script: str) -> str:
        """Run a script with the environment's programs; our distributions come from the built
        wheels.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "AMANDA_", "RANK", "VIRTUAL_ENV"))
        }
        done = subprocess.run(
            ["sh", "-c", _PIP_INSTALL.sub(self._installing, script)],
            cwd=self.work,
            env={
                **kept,
                "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
                "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}\nIt ended with {done.returncode}")
        return done.stdout

    def _installing(self, command: re.Match[str]) -> str:
        words = (self._wheel(word.strip('"')) for word in command["what"].split())
        return " ".join([command["pip"], *words])

    def python(self, source: str, status: int = 0) -> str:
        """Run a program that is given as text."""
        return self.run("python", "-c", source, status=status)

    def install(self, *requirements: str) -> None:
        """Install built and other distributions, and check that all fit together."""
        found = [self._wheel(requirement) for requirement in requirements]
        constraints = str(ROOT / "constraints.txt")
        self.run("python", "-m", "pip", "install", "-q", "-c", constraints, *found)
        self.run("python", "-m", "pip", "check")

    def _wheel(self, requirement: str) -> str:
        # By the wheels' paths: an index may have something else of these names.
        name, bracket, extra = requirement.partition("[")
        for path in self.wheels.glob(f"{name.replace('-', '_')}-*.whl"):
            return f"{path}{bracket}{extra}"
        return requirement

    def uninstall(self, *distributions: str) -> None:
        """Uninstall distributions that no remaining one needs."""
        self.run("python", "-m", "pip", "uninstall", "-q", "-y", *distributions)
        self.run("python", "-m", "pip", "check")

    def lacks(self, *modules: str) -> None:
        """Check that modules are missing, so that the next check means something."""
        self.python(
            "from importlib.util import find_spec; "
            f"found = [name for name in {modules!r} if find_spec(name)]; assert not found, found"
        )

    def test(self, source: Path, *arguments: str) -> str:
        """Run a distribution's own tests against the installed version, without its sources."""
        copy = self.work / source.name
        if not copy.exists():
            hidden = shutil.ignore_patterns("src", "build", "*.egg-info", "__pycache__")
            shutil.copytree(source, copy, ignore=hidden)
        return self.run("python", "-m", "pytest", "-q", f"--rootdir={copy}", str(copy), *arguments)

    def json(self, *arguments: str, status: int = 0) -> Any:
        """Return the JSON output of a command of `amanda`."""
        return json.loads(self.run("amanda", *arguments, "--json", status=status))

    def names(self, command: str) -> list[str]:
        """Return the names of the drivers or tools that are listed as usable."""
        return sorted(found["name"] for found in self.json(command) if found["status"] == "ok")
