"""Folders and files for results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["create_folder", "whole_file", "write_text"]


def create_folder(folder: Path | str) -> Path:
    """Create a folder and its parents if necessary, and return its path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     create_folder(f"{folder}/results/first").is_dir()
    True
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write a file whole or not at all.

    A link in its place is replaced, not followed.

    Yields:
        The empty file to write to, which becomes `path` at the end of the block.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder, "result.bin")) as new:
    ...         written = new.write_bytes(b"12")
    ...     Path(folder, "result.bin").read_bytes()
    b'12'
    """
    new = path.with_name(f".{os.getpid()}.{path.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    new.unlink(missing_ok=True)
    os.close(os.open(new, flags, 0o666))
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder, "result.txt"), "all of it")
    ...     Path(folder, "result.txt").read_text()
    'all of it'
    """
    with whole_file(path) as new:
        new.write_text(text, encoding="utf-8")
