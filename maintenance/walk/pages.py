"""Reads the fenced blocks of pages: which language, which file they are written to, which line.

A block after the line `` `NAME`: `` is the contents of that file.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Block", "blocks", "commands"]

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"^(?:`(?P<file>[^\s`]+)`:\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    file: str | None
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    text = page.read_text("utf-8")
    for found in _BLOCK.finditer(text):
        line = text[: found.start("text")].count("\n") + 1
        yield Block(found["language"], found["file"], textwrap.dedent(found["text"]), line)


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Yield each command of a `console` block, and the output that the page shows."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected
