"""Warnings that point to a line of the program, and not to a line of Amanda or of a framework.

Owns the search for that line, and what happens if a warning is raised where nothing may be.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType

from amanda_core.errors import AmandaWarning
from amanda_core.runtime.containment import CALLERS

__all__ = ["program_frame", "warn"]

_OWN = ("amanda", "amanda_core", "contextlib", "pluggy", "importlib", "importlib_metadata")


def warn(
    message: str,
    between: Iterable[str] = (),
    *,
    category: type[AmandaWarning] = AmandaWarning,
    importing: bool = False,
) -> None:
    """Warn of the innermost line outside of Amanda, the drivers and their frameworks.

    Args:
        message: The text.
        between: Names of further packages that call Amanda for the program, such as libraries on
            top of a framework.
        category: The category of the warning.
        importing: Whether an import may be running, which must not fail if warnings are errors, and
            would look like the cause. Then such a warning goes to stderr.
    """
    frame = program_frame(sys._getframe(1), between)
    try:
        warnings.warn_explicit(
            message,
            category,
            frame.f_code.co_filename,
            frame.f_lineno,
            frame.f_globals.get("__name__"),
            frame.f_globals.setdefault("__warningregistry__", {}),
        )
    except Exception:  # The warning itself, or an error of the program's own `showwarning`.
        if not importing:
            raise
        with suppress(Exception):
            print(f"{category.__name__}: {message}", file=sys.stderr, flush=True)


def program_frame(frame: FrameType, between: Iterable[str] = ()) -> FrameType:
    """Return the innermost frame outside of Amanda, the drivers and their frameworks.

    Args:
        frame: The frame to begin with.
        between: As in `warn`.
    """
    # By file and not by name, because a test runner may name its modules below a package.
    passed = ("<frozen ", *_files([*_OWN, *CALLERS, *between]))
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(passed)
        # Python drops a warning of code without a module, such as what a compiler generated.
        or frame.f_globals.get("__name__") is None
    ):
        frame = frame.f_back
    return frame


def _files(names: Iterable[str]) -> Iterator[str]:
    """Yield what the files of packages and modules begin with."""
    for name in names:
        module = sys.modules.get(name)
        folders = getattr(module, "__path__", None)
        file = getattr(module, "__file__", None)
        if folders is not None:
            yield from (os.path.join(folder, "") for folder in folders)
        elif file is not None:
            yield file
