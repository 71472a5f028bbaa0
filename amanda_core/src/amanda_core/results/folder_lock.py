"""`FolderLock`: a folder that one process writes to.

The lock is that of the operating system, which ends with the process. So a run that was killed does
not keep others out.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["FolderLock", "claim", "is_locked"]


class FolderLock:
    """A lock file in a folder: `acquire` takes it at once or not at all, `release` removes it.

    On file systems and platforms without locks, the file itself is the lock: after a process was
    killed, it has to be removed by hand.

    Args:
        path: Path of the lock file. A link in its place is not followed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        #: Forks have the lock, too, but do not release it.
        self._process = os.getpid()

    def acquire(self) -> bool:
        """Lock the folder, or return False if another process has locked it.

        Raises:
            OSError: The lock file cannot be created.
        """
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        while True:
            try:
                file, created = os.open(self.path, flags | os.O_EXCL, 0o666), True
            except FileExistsError:
                file, created = os.open(self.path, flags, 0o666), False
            locked = _lock(file)
            if locked is None:
                locked = created
            elif locked and not _is_at(file, self.path):
                # Its previous holder removed it after we had opened it.
                os.close(file)
                continue
            if locked:
                self._file = file
            else:
                os.close(file)
            return locked

    def release(self) -> None:
        """Remove the lock file, if this process has locked the folder."""
        if self._file is None or self._process != os.getpid():
            return
        with suppress(OSError):
            self.path.unlink()
        # Processes that the program forked have the file open, too, and may outlive us.
        with suppress(OSError):
            _unlock(self._file)
        with suppress(OSError):
            os.close(self._file)
        self._file = None


def is_locked(path: Path) -> bool:
    """Return True if a process has locked a lock file, or if that cannot be known."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        return _lock(file, shared=True) is not True
    finally:
        os.close(file)


def claim(path: Path, owner: str) -> bool:
    """Write the name of an owner into a file that has none; return False if it has another.

    Raises:
        OSError: The file cannot be read or written.
    """
    with path.open("a+", encoding="utf-8") as file:
        if sys.platform != "win32":
            with suppress(OSError):  # The file system has no locks.
                fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        found = file.read()
        if not found:
            file.write(owner)
        return found in ("", owner)


def _lock(file: int, shared: bool = False) -> bool | None:
    """Lock a file; return False if it is locked already, and None where there are no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(file: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_UN)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
