"""Packages that only some forms of output need, imported when they are asked for."""

from __future__ import annotations

import importlib
from typing import Any

from amanda_core.errors import MissingExtraError

__all__ = ["require"]


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
