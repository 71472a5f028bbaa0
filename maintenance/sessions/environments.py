"""The environments of the sessions: a shared one, those of single drivers, and what is installed.

The sessions share one environment, .nox/python3.X, because PyTorch alone takes most of a gigabyte.
What must not stand beside the others has an environment *apart*, with a name.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import nox

__all__ = ["APART", "FEW", "ROOT", "copy_of", "environment", "group", "programs_of", "run"]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".nox" / "python{}.{}".format(*sys.version_info)
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")
LEFT_BY_BUILDS = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")

#: The distributions, by folder, each with the extra that the sessions use.
MEMBERS = {
    "amanda_core": "[cli]",
    "amanda_driver_onnxruntime": "",
    "amanda_driver_tf": "",
    "amanda_driver_torch": "",
    "amanda_tools": "",
}


class Apart(NamedTuple):
    """The environment of a driver whose framework cannot stand beside the others."""

    #: The group of the framework, and of what it pins otherwise than constraints.txt.
    group: str
    #: The newest Python that these packages have wheels for.
    newest: tuple[int, int] = (99, 0)
    oldest: tuple[int, int] = (3, 11)
    #: Whether only its own session and `nightly` make it.
    large: bool = False

    @property
    def fits(self) -> bool:
        """Return True if there are packages for this Python."""
        return self.oldest <= sys.version_info[:2] <= self.newest


APART = {
    # Its environment is small, and that of the others large enough.
    "amanda_driver_jax": Apart("jax"),
    # MindSpore takes 2.5 GB, and its last release is built for NumPy 1.
    "amanda_driver_mindspore": Apart("mindspore", newest=(3, 12), large=True),
    "amanda_driver_mxnet": Apart("mxnet", newest=(3, 11)),
}
#: The environment of `tests`, beside those of `APART`.
FEW = "tests"


def group(*names: str) -> tuple[str, ...]:
    """Return the packages of dependency groups."""
    return nox.project.dependency_groups(GROUPS, *names)


def environment(session: nox.Session, *groups: str, apart: str = "", loose: str = "") -> None:
    """Create or update the shared environment with the members and groups of packages.

    If `apart` names a driver, it is that driver's environment, with its framework, the core and the
    tools. The group `loose` is installed without what its packages require.

    The members are installed as wheels, as users get them, not as editables. So a module, a type
    marker or an entry point that packaging forgets is missing here, too.
    """
    folder = environment_of(apart)
    new = shutil.which("pip", path=programs_of(apart)) is None
    if new:
        session.log(f"Creating {folder}")
        venv.create(folder, with_pip=True)
    alone = APART.get(apart)
    own = group(alone.group) if alone else ()
    chosen = {"amanda_core": "[cli]", apart: "", "amanda_tools": ""} if alone else MEMBERS
    pinned = [_distribution(package) for package in own]
    pip = ("python", "-m", "pip")
    # Quiet once there is not much to tell but "Requirement already satisfied".
    install = [*pip, "install", *([] if new else ["-q"])]
    with tempfile.TemporaryDirectory() as temporary:
        constraints = Path(temporary, "constraints.txt")
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        kept = [line for line in lines if _distribution(line) not in pinned]
        constraints.write_text("".join(kept))
        members = [f"{copy_of(member, temporary)}{extra}" for member, extra in chosen.items()]
        packages = [*members, *own, *(group(*groups) if groups else ())]
        run(session, *install, "-c", str(constraints), *packages, apart=apart)
    if loose:
        run(session, *pip, "install", "-q", "--no-deps", *group(loose), apart=apart)
    else:
        run(session, *pip, "check", apart=apart)


def _distribution(requirement: str) -> str:
    """Return the name of what is required, without its extras, version and marker."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def copy_of(member: str, folder: str) -> Path:
    """Copy the sources of a member, to be built in `folder`.

    setuptools builds in the source tree and takes what an earlier build left there: a module
    deleted since would be in the wheel. A copy is clean, and so is the checkout.
    """
    return shutil.copytree(ROOT / member, Path(folder, member), ignore=LEFT_BY_BUILDS)


def environment_of(apart: str) -> Path:
    """Return the folder of the shared environment, or of the one apart that has this name."""
    return ENVIRONMENT.with_name(f"{ENVIRONMENT.name}-{apart}") if apart else ENVIRONMENT


def programs_of(apart: str) -> Path:
    """Return the folder of an environment's programs."""
    return environment_of(apart) / ("Scripts" if os.name == "nt" else "bin")


def run(
    session: nox.Session,
    program: str,
    *arguments: str,
    success_codes: Sequence[int] = (0,),
    apart: str = "",
    **env: str,
) -> None:
    """Run a program of the shared environment, or of the one apart that has this name."""
    path = str(programs_of(apart) / program)
    session.run(path, *arguments, env=env, external=True, success_codes=success_codes)
