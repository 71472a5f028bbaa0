"""`amanda new`: starting a distribution of a tool or a driver, which passes its own tests.

Owns the names that are derived from NAME, and writes the templates. They are in `templates/`; the
paths and contents of their files have ``string.Template`` placeholders.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import click

from amanda_core import DRIVER_API, __version__
from amanda_core.errors import ConfigError, OutputError
from amanda_core.plugins.installed import canonical, distribution_names
from amanda_core.results import printable

__all__ = ["new", "words_of"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 40
_SUFFIX = ".tmpl"


@click.group()
def new() -> None:
    """Start a distribution of one's own."""


@new.command()
@click.argument("name")
@click.option("-o", "--output", default=".", metavar="DIR", help="Folder to make it in.")
def tool(name: str, output: str) -> None:
    """Make a distribution amanda-tool-NAME: a tool with options, a result and tests."""
    _make("tool", name, Path(output))


@new.command()
@click.argument("name")
@click.option("-o", "--output", default=".", metavar="DIR", help="Folder to make it in.")
def driver(name: str, output: str) -> None:
    """Make a distribution amanda-driver-NAME: a driver that passes the conformance kit.

    It drives a framework of three operators that it brings; put your framework in its place.
    """
    _make("driver", name, Path(output))


def _make(kind: str, name: str, parent: Path) -> None:
    words = words_of(kind, name)
    folder = parent / words["distribution"]
    if os.path.lexists(folder):
        raise OutputError(
            f"{str(folder)!r} already exists", fix="Remove it, or name another folder with -o"
        )
    if canonical(words["distribution"]) in distribution_names():
        raise ConfigError(
            f"A distribution {words['distribution']!r} is already installed",
            where="NAME",
            fix="Choose another name: installing yours would remove it",
        )
    files = dict(_filled(kind, words))
    try:
        folder.mkdir(parents=True)
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OutputError(
            f"{str(folder)!r} cannot be written: {error.strerror or error}"
        ) from error
    for path in sorted(files):
        click.echo(printable(folder / path))
    click.echo(f'\nNext: cd {printable(folder)} && pip install -e ".[test]" && pytest', err=True)


def words_of(kind: str, name: str) -> dict[str, str]:
    """Return the values of the placeholders.

    Raises:
        ConfigError: A distribution or module cannot have this name.
    """
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ConfigError(
            f"{name[:80]!r} is not a valid name for a {kind}",
            where="NAME",
            fix=f"Use lower-case letters, digits and single '-' inside, at most {_LONGEST}, such "
            f"as 'my-{kind}'",
        )
    module = name.replace("-", "_")
    stem = "".join(part.capitalize() for part in name.split("-"))
    major, minor = __version__.split(".")[:2]
    return {
        "name": name,
        "module": module,
        "stem": stem,
        # The suffix avoids names that Python already has, such as `any`.
        "class_name": f"{stem}Tool",
        "distribution": f"amanda-{kind}-{name}",
        "package": f"amanda_{kind}_{module}",
        "version": f"{major}.{minor}",
        "next_version": f"{major}.{int(minor) + 1}",
        "driver_api": str(DRIVER_API),
    }


def _filled(kind: str, words: dict[str, str]) -> Iterator[tuple[Path, str]]:
    """Yield the path within the distribution and the content of each file."""
    waiting: list[tuple[Path, Any]] = [
        (Path(), resources.files("amanda_core.cli") / "templates" / kind)
    ]
    while waiting:
        path, found = waiting.pop()
        for entry in found.iterdir():
            name = entry.name.replace("PACKAGE", words["package"]).replace(
                "MODULE", words["module"]
            )
            if entry.is_dir():
                waiting.append((path / name, entry))
            elif name.endswith(_SUFFIX):
                text = Template(entry.read_text(encoding="utf-8")).substitute(words)
                yield path / name.removesuffix(_SUFFIX), text
