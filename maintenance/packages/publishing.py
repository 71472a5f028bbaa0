"""Follow the guide to publishing a tool in a fresh environment, from the first line to the last.

Converts the guide's blocks to one shell session; `packages` has the wheels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .environments import ROOT, Environment

__all__ = ["follow", "script"]

GUIDE = ROOT / "docs/guides/publishing-a-tool.md"
_BLOCK = re.compile(
    r"^(?:`(?P<file>[^\s`]+)`:\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def script(text: str) -> str:
    """Return what a reader of a guide types as one script: first its files, then its commands."""
    return "\n".join(["set -ex", *_files(text), *_commands(text)])


def _files(text: str) -> Iterator[str]:
    for block in _BLOCK.finditer(text):
        if block["file"]:
            yield f"cat > {block['file']} <<'END_OF_FILE'\n{block['text']}END_OF_FILE"


def _commands(text: str) -> Iterator[str]:
    for block in _BLOCK.finditer(text):
        if block["language"] == "sh":
            yield block["text"].rstrip()
        elif block["language"] == "console":
            yield from re.findall(r"^\$ (.*)$", block["text"], re.MULTILINE)


def follow(environment: Environment) -> None:
    """Run the guide, with the built distributions in place of published ones."""
    said = environment.shell(script(GUIDE.read_text()))
    assert "4 passed, 1 skipped" in said, said
    assert "op-report.json: op-report/1" in said, said
    shown = said.rpartition("op-report.json: op-report/1")[2]
    assert re.search(r"^0/linear +1$", shown, re.MULTILINE), said


def main() -> None:
    """Print the script."""
    print(script(Path(GUIDE).read_text()))


if __name__ == "__main__":
    main()
