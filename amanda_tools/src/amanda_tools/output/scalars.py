"""Scalars for TensorBoard, written by its own writer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["write_scalars"]


def write_scalars(folder: Path, rows: Iterable[tuple[str, int, float]]) -> None:
    """Write an event file.

    Args:
        folder: Folder of the run.
        rows: ``(tag, step, value)`` for each scalar.

    Raises:
        ImportError: tensorboard is not installed.
    """
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        raise ImportError(
            "TensorBoard's files need tensorboard: pip install 'amanda-tools[tensorboard]'"
        ) from error
    writer = Writer(str(folder))
    for tag, step, value in rows:
        writer.add_scalar(tag, value, step)
    writer.close()
