"""Guides and pages of tools: their files are written, their programs and commands run, in order.

A Python block is executed; all blocks of a page share one namespace. A block after ``<!-- file:
NAME -->`` is written to that file instead. In a `console` block each ``$`` line is run, and the
lines below it must occur in the output in that order, with ``...`` for anything. Other blocks are
ignored.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from amanda_core import hookspecs
from amanda_core.testing import CAPABILITIES

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

ROOT = Path(__file__).parents[1]
GUIDES = sorted(
    page for part in ("guides", "tools") for page in (ROOT / "docs" / part).glob("*.md")
)
_BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    """A fenced block of a page."""

    language: str
    file: str | None
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        line = text[: found.start("text")].count("\n") + 1
        yield Block(found["language"], found["file"], textwrap.dedent(found["text"]), line)


def run(block: Block, where: str) -> None:
    """Run the commands of a block and compare their output."""
    folder = os.path.dirname(sys.executable)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    commands = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    for part in commands:
        command, _, expected = part.partition("\n")
        done = subprocess.run(
            command,
            shell=True,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{where}: {command}\n{done.stdout}"
        rest = iter(done.stdout.splitlines())
        for line in filter(None, expected.splitlines()):
            # Columns are as wide as their contents, which differ by place and version.
            words = (re.escape(word).replace(r"\.\.\.", ".*") for word in line.split())
            pattern = re.compile(r"\s+".join(words) + ("" if line.endswith("...") else r".*"))
            assert any(pattern.match(given) for given in rest), f"{where}: {line}\n{done.stdout}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_what_a_guide_shows_works(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": f"guide_{page.stem}"}
    before = set(sys.modules)
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.file is not None:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        elif block.language == "console":
            run(block, where)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_block_has_a_language() -> None:
    for page in GUIDES:
        assert page.read_text().count("```") == 2 * len(list(blocks(page)))
        assert all(block.language for block in blocks(page))


def test_every_hook_is_in_the_reference_with_its_signature() -> None:
    text = (ROOT / "docs/guides/hooks.md").read_text()
    documented = re.findall(r"^## `(amanda_\w+)(\(.*)`$", text, re.MULTILINE)
    hooks = {name: found for name, found in vars(hookspecs).items() if name.startswith("amanda_")}
    assert dict(documented) == {
        name: str(inspect.signature(hook)).replace("'", "") for name, hook in hooks.items()
    }


def test_every_capability_is_in_the_guide() -> None:
    text = (ROOT / "docs/guides/writing-a-driver.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    assert {word: meaning.replace("`", "") for word, meaning in table} == dict(CAPABILITIES)


def test_links_lead_somewhere() -> None:
    for page in GUIDES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), target
