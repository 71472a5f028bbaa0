"""Folders in which tools keep what they record while a program runs.

Under `amanda run` they lie beside the results, so that they outlive a process that is killed; the
state of the run says where. Otherwise they are temporary.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

from amanda_core.results.run_state import RunState

__all__ = [
    "drop_records",
    "keep_records_in",
    "record_beside",
    "record_folder",
    "records_of",
    "remove_records",
]

#: A folder in that of a process's results, or beside it.
_PLACE = re.compile(r"(\.\./)?\.[\w-]+\.recording-\w+", re.ASCII)
_folder: Path | None = None
#: What made a folder, by its `id` -> the folder, and the process.
_made: dict[int, tuple[Path, int]] = {}


def keep_records_in(folder: Path) -> None:
    """Let the folders of `record_folder` be made here from now on."""
    global _folder
    _folder = folder


def record_folder(owner: object, name: str) -> Path:
    """Create a folder that is removed with `owner`, but not by a fork of this process.

    >>> class Owner: ...
    >>> owner = Owner()
    >>> folder = record_folder(owner, "example")
    >>> del owner
    >>> folder.exists()
    False
    """
    if _folder is None:
        folder = Path(tempfile.mkdtemp(prefix=f"amanda-{name}-"))
    else:
        _folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{name}.recording-", dir=_folder))
    _made[id(owner)] = folder, os.getpid()
    weakref.finalize(owner, _remove, id(owner))
    return folder


def records_of(tools: Mapping[str, object], results: Path) -> dict[str, str]:
    """Return the folders of tools, by the names of their results and relative to their folder."""
    return {
        name: Path(os.path.relpath(_made[id(tool)][0], results)).as_posix()
        for name, tool in tools.items()
        if _folder is not None and id(tool) in _made
    }


def drop_records() -> None:
    """Remove the folders that this process has made beside results, which are complete now."""
    if _folder is not None:
        for key in tuple(_made):
            _remove(key)


def record_beside(results: Path, name: str) -> Path | None:
    """Return what a tool had recorded when its process was killed; None if there is nothing.

    Args:
        results: Folder of the results of the process.
        name: Name of the tool's result.
    """
    return _left(results).get(name)


def remove_records(results: Path) -> None:
    """Remove what a process that was killed has recorded, to whose results no run writes now."""
    for folder in _left(results).values():
        shutil.rmtree(folder, ignore_errors=True)


def _left(results: Path) -> dict[str, Path]:
    """Return the folders that the state of a process names. Nothing in its file is trusted."""
    state = RunState.read(results)
    places = state.records if state is not None and isinstance(state.records, dict) else {}
    found = {
        name: results / place
        for name, place in places.items()
        if isinstance(place, str) and _PLACE.fullmatch(place)
    }
    return {n: one for n, one in found.items() if one.is_dir() and not one.is_symlink()}


def _remove(key: int) -> None:
    folder, process = _made.pop(key, (None, None))
    if folder is not None and process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
