"""Optional packages and programs that only some output formats need."""

from __future__ import annotations

import importlib
import shutil
from typing import Any

from amanda_core.errors import MissingExtraError
from amanda_core.plugins.requirements import extra_command

__all__ = ["need_safetensors", "program", "require"]


def require(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Name of the module.
        extra: The extra of `amanda-tools` that installs it.

    Raises:
        MissingExtraError: The module cannot be imported.

    >>> require("json", "pandas").loads("[1]")
    [1]
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"This needs {module.partition('.')[0]}, which cannot be imported: {error}",
            fix=f"Run: {extra_command('amanda-tools', extra)} (the extra amanda-tools[{extra}])",
        ) from error


def program(name: str, package: str) -> str:
    """Return the path of an executable.

    Args:
        name: Name of the executable.
        package: The software that provides it, for the error message.

    Raises:
        MissingExtraError: The executable is not found.
    """
    found = shutil.which(name)
    if found is None:
        raise MissingExtraError(
            f"This needs {package}, whose program {name!r} is not found",
            fix=f"Install {package} with the system's package manager",
        )
    return found


def need_safetensors() -> Any:
    """Return the module `safetensors.numpy`.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            f"This needs safetensors: {extra_command('amanda-tools', 'safetensors')}"
        ) from error
    return safetensors.numpy
