"""Packages and programs that only some forms of output need, looked for when they are asked for."""

from __future__ import annotations

import importlib
import shutil
from typing import Any

from amanda_core.errors import MissingExtraError

__all__ = ["program", "require"]


def require(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Its name.
        extra: The extra of `amanda-tools` that brings it.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"This needs {module.partition('.')[0]}, which cannot be imported: {error}",
            fix=f"Run: pip install 'amanda-tools[{extra}]'",
        ) from error


def program(name: str, package: str) -> str:
    """The path of a program.

    Args:
        name: Its name.
        package: What it is a part of, for people.

    Raises:
        MissingExtraError: It is not installed.
    """
    found = shutil.which(name)
    if found is None:
        raise MissingExtraError(
            f"This needs {package}, whose program {name!r} is not found",
            fix=f"Install {package} with the system's package manager",
        )
    return found
