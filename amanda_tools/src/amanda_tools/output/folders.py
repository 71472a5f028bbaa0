"""Folders that results are written to."""

from __future__ import annotations

from pathlib import Path

__all__ = ["made"]


def made(folder: Path | str) -> Path:
    """A folder, made with those around it if it is not there."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path
