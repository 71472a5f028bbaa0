"""Folders for results."""

from __future__ import annotations

from pathlib import Path

__all__ = ["create_folder"]


def create_folder(folder: Path | str) -> Path:
    """Create a folder and its parents if necessary, and return its path."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path
