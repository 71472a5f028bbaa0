"""The folder that the results of a run are written to.

Owns the rules of writing: nothing is written outside of the folder or through a link, nothing is
replaced silently, two runs never mix their results, and what a reader finds is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from amanda_core.errors import OutputError, ResultError
from amanda_core.results.folder_lock import FolderLock
from amanda_core.results.records import remove_records
from amanda_core.results.run_state import LOCK, STATE, RunState
from amanda_core.results.tables import Result
from amanda_core.runtime.terminal import printable

__all__ = ["LOCK", "Output", "index_of", "processes_in"]

#: Folders of single processes.
_PART = re.compile(r"(rank|process-)(\d+)(-restart\d+)?")


def index_of(name: str) -> str:
    """Return the name of the file that has the index of a result; see `processes.index`."""
    return f".{name}.index"


def processes_in(folder: Path) -> list[Path]:
    """Return the folders of the single processes of a run, by their numbers."""
    found = [(match, path) for path in folder.iterdir() if (match := _PART.fullmatch(path.name))]
    found.sort(
        key=lambda one: (
            one[0][1] != "rank",
            int(one[0][2]),
            int((one[0][3] or "").rpartition("restart")[2] or 0),
        )
    )
    return [path for _, path in found if path.is_dir()]


class Output:
    """The folder that the results of one run are written to. The first write creates it.

    Args:
        folder: The folder. A link to a folder is followed; links inside it are not.
        part: Name of a folder inside, for the results of one of several processes.
        names: Names of the tools. Whoever has read them has checked them.
        force: Whether to replace existing results of these names.

    Raises:
        OutputError: It cannot be written to, or has results of these names.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], *, part: str = "", force: bool = False
    ) -> None:
        self._top = self.folder = folder.resolve()
        self._names, self._force, self.part = list(names), force, part
        if part:
            self.folder = self._inside(part)
        for parent in (self.folder, *self.folder.parents):
            if parent.exists():
                if not parent.is_dir():
                    raise OutputError(f"{str(parent)!r} is not a folder", fix="Name another one")
                if not os.access(parent, os.W_OK | os.X_OK):
                    raise OutputError(f"{str(parent)!r} cannot be written to", fix="Name another")
                break
        #: Names of the results that this object wrote, which it may replace.
        self._written: set[str] = set()
        self._lock: FolderLock | None = None
        #: Folders that `reserve` created, innermost first.
        self._created: list[Path] = []
        taken = self.taken(self.folder, self._names)
        if taken and not self._force:
            raise OutputError(
                f"{str(self.folder)!r} has results already: {', '.join(taken)}",
                fix="Name another folder with -o, or replace them with --force",
            )

    @staticmethod
    def taken(folder: Path, names: Sequence[str]) -> list[str]:
        """Return the files and folders of these tools that already exist in `folder`."""
        found = [f"{name}.json" for name in names] + list(names)
        return [name for name in found if os.path.lexists(folder / name)]

    def reserve(self) -> bool:
        """Keep other runs out of the folder until `release`; create it if necessary.

        Returns:
            False if another run has reserved it, or has written these results meanwhile.

        Raises:
            OutputError: The folder cannot be created.
        """
        parents = (self.folder, *self.folder.parents)
        created = [folder for folder in parents if not folder.exists()]
        lock = FolderLock(self.folder / LOCK)
        with self._failing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not lock.acquire():
                return False
        self._lock, self._created = lock, created
        if self._force:
            remove_records(self.folder)
        if self._force or not self.taken(self.folder, self._names):
            return True
        self.release()
        return False

    def release(self) -> None:
        """End the reservation. Folders that it created are removed if they are empty."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        for folder in self._created:
            with suppress(OSError):
                folder.rmdir()
        self._created = []

    def discard(self) -> None:
        """Remove what was written here, and end the reservation."""
        for name in self._written:
            self._remove(self.folder / f"{name}.json")
        self.note(None)
        self.release()

    def clear(self, processes: int | None = None, run: str | None = None) -> None:
        """Remove the earlier results of these tools, if they may be replaced.

        Args:
            processes: Number of processes of this run, 0 if it has no parts. The results of all
                other processes are removed as well. None removes only those of this one.
            run: Identifies this run. What other processes of it wrote is not removed.

        Raises:
            OutputError: One of them cannot be removed.
        """
        if not self._force:
            return
        folders = {self.folder}
        if processes is not None and self._top.is_dir():
            folders.add(self._top)
            for path in self._top.iterdir():
                part = _PART.fullmatch(path.name)
                if part is None or path.is_symlink():
                    continue
                state = RunState.read(path) if run is not None else None
                is_left = part[1] != "rank" or part[3] or int(part[2]) >= processes
                if is_left and (state is None or state.run != run):
                    folders.add(path)
        names = "|".join(map(re.escape, self._names))
        unfinished = re.compile(rf"\.({names})((\.json)?\.\d+|\.index)")
        for folder in folders:
            left = [path.name for path in folder.glob(".*") if unfinished.fullmatch(path.name)]
            for name in [*self.taken(folder, self._names), *left]:
                self._remove(folder / name)
            if folder != self.folder:
                self._remove(folder / STATE)
            if folder not in (self.folder, self._top):
                with suppress(OSError):  # It is not empty.
                    folder.rmdir()

    def note(self, state: RunState | None) -> None:
        """Write the state of this process beside its results; None removes it.

        Raises:
            OutputError: It cannot be written.
        """
        if state is None:
            self._remove(self.folder / STATE)
        else:
            self._write_file(self.folder / STATE, state.to_json())

    def write_index(self, name: str, text: str) -> None:
        """Write the index of a result, which readers check against its file.

        Raises:
            OutputError: It cannot be written.
        """
        self._write_file(self.folder / index_of(name), text)

    def save(self, name: str, text: str) -> None:
        """Write a result so far to ``<name>.json``, where `write` will replace it.

        Raises:
            OutputError: It is outside of the folder or cannot be written.
        """
        file = self._inside(f"{name}.json")
        if not self._force and name not in self._written and self.taken(self.folder, [name]):
            raise OutputError(
                f"{str(file)!r} exists meanwhile", fix="Name another folder, or use --force"
            )
        self._written.add(name)
        self._write_file(file, text)

    def write(self, name: str, result: Result) -> list[Path]:
        """Write a tool's result to ``<name>.json``, and its further files to ``<name>/``.

        Both appear when they are complete. If the further files cannot be written, none of them
        appears.

        Returns:
            The files.

        Raises:
            OutputError: A file is outside of the folder or cannot be written.
            ResultError: The result's JSON is malformed.
        """
        own, file = self._inside(name), self._inside(f"{name}.json")
        text = result.to_json()
        try:
            json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError, TypeError) as error:
            raise ResultError(
                f"The result of {name!r} is not JSON: {error}", fix="Correct its to_json()"
            ) from error
        if not self._force and name not in self._written and self.taken(self.folder, [name]):
            raise OutputError(
                f"{str(file)!r} exists meanwhile", fix="Name another folder, or use --force"
            )
        self._written.add(name)
        with self._failing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        for path in (file, own):
            self._remove(path)
        write = getattr(result, "write", None)
        try:
            files = self._write_folder(own, write) if write is not None else []
        finally:
            # It is complete without the further files.
            self._write_file(file, text)
        return [file, *files]

    def _inside(self, name: str) -> Path:
        path = self.folder / name
        if name in ("", ".", "..") or "\0" in name or path.parent != self.folder or "/" in name:
            raise OutputError(f"{name[:80]!r} is not a file name", fix="Give the tool another name")
        if path.is_symlink():
            raise OutputError(
                f"{str(path)!r} is a link, and is not followed", fix="Remove it, or name another"
            )
        return path

    def _write_folder(self, own: Path, write: Any) -> list[Path]:
        """Write the files of a result into a temporary folder, and rename it when all are there."""
        new = self._new(own)
        with self._failing(own):
            new.mkdir()
        try:
            files = [self._checked(new, Path(path), own) for path in write(new)]
            if any(new.iterdir()):
                with self._failing(own):
                    new.rename(own)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return files

    def _write_file(self, path: Path, text: str) -> None:
        # A link that somebody has put there is replaced, not followed.
        new = self._new(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with self._failing(path):
            try:
                with open(os.open(new, flags, 0o666), "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(new, path)
            finally:
                new.unlink(missing_ok=True)

    @staticmethod
    def _new(path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}")

    def _remove(self, path: Path) -> None:
        with self._failing(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @staticmethod
    def _checked(new: Path, path: Path, own: Path) -> Path:
        lexical = path if path.is_absolute() else new / path
        resolved = lexical.resolve()
        if not resolved.is_relative_to(new) or lexical.is_symlink():
            raise OutputError(
                f"The tool {own.name!r} wrote {printable(path)[:200]!r}, outside of its "
                f"folder {str(own)!r}",
                fix="A result's write() must stay in the folder that it is given",
            )
        if not resolved.is_file():
            raise OutputError(
                f"The tool {own.name!r} wrote {printable(path)[:200]!r}, which is not a file",
                fix="A result's write() must return the files that it wrote",
            )
        return own / resolved.relative_to(new)

    @staticmethod
    @contextmanager
    def _failing(path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, OutputError):
                raise
            raise OutputError(
                f"{str(path)!r} cannot be written: {error.strerror or error}"
            ) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
