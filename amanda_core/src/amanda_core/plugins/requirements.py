"""What installed distributions require: what of it is missing, and how to install an extra.

Only names are looked up, not versions, and nothing is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import importlib_metadata

from amanda_core.runtime.containment import contain

__all__ = ["Missing", "extra_command", "is_installed", "missing"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_PYTHON = re.compile(r"""python_version\s*(<|>=)\s*['"](\d+)\.(\d+)['"]""")


class Missing(NamedTuple):
    """A requirement of an installed distribution that is not installed.

    Attributes:
        of: Name of the distribution.
        name: Name of the distribution that it requires.
        requirement: The same with its versions, as pip takes it.
    """

    of: str
    name: str
    requirement: str


def missing(distributions: Iterable[str]) -> list[Missing]:
    """Return what these distributions require in any case and what is not installed."""
    found = []
    for of in dict.fromkeys(distributions):
        for requirement, extra in _requirements(of):
            name = _NAME.match(requirement)
            if extra is None and name is not None and not is_installed(name.group()):
                found.append(Missing(of, name.group(), requirement))
    return found


def extra_command(distribution: str, extra: str) -> str:
    """Return a command that installs what an extra requires.

    It names the requirements and not the distribution, which may come from a folder and be on no
    index.

    >>> extra_command("amanda-core", "none")
    "pip install 'amanda-core[none]'"
    """
    needed = [one for one, of in _requirements(distribution) if of == extra]
    return f"pip install {' '.join(repr(one) for one in needed or [f'{distribution}[{extra}]'])}"


def _requirements(distribution: str) -> Iterator[tuple[str, str | None]]:
    """Yield the requirements that hold for this Python, and their extras."""
    try:
        required = importlib_metadata.requires(distribution) or ()
    except BaseException as error:
        contain(error)  # There is no such distribution, or its metadata cannot be read.
        return
    for line in required:
        requirement, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        for operator, *version in _PYTHON.findall(marker):
            if (sys.version_info[:2] < tuple(map(int, version))) != (operator == "<"):
                break
        else:
            # What else a marker says, such as a platform, is not judged here.
            if not _PYTHON.sub("", _EXTRA.sub("", marker)).strip(" ()and"):
                yield requirement.replace(" ", ""), extra and extra.group(1)


def is_installed(name: str) -> bool:
    """Return True if there is a distribution of this name."""
    try:
        importlib_metadata.distribution(name)
    except BaseException as error:
        contain(error)
        return False
    return True
