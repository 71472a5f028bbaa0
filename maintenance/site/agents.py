"""`llms.txt` and `llms-full.txt`: the documentation for programs that read it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["files"]

ROOT = Path(__file__).resolve().parents[2]
URL = "https://github.com/amanda-dnn/amanda/blob/main/docs/"
#: Pages that only list what is in the sources, or measurements.
_LEFT_OUT = ("reference/kit", "reference/interface", "reference/driver-kit", "benchmarks/")
_ENTRY = re.compile(r"^ +- (\S+\.md)$|^  - ([^:]+):$|^      - ([^:]+):$", re.MULTILINE)


def _navigation() -> list[tuple[str, list[Path]]]:
    """Return the parts of the site, each with its pages."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    found: list[tuple[str, list[Path]]] = []
    for page, part, _ in _ENTRY.findall(text):
        if part:
            found.append((part, []))
        elif page:
            found[-1][1].append(ROOT / "docs" / page)
    return found


def _title_and_gist(text: str) -> tuple[str, str]:
    """Return the heading of a page, and its first sentence."""
    title, _, rest = text.partition("\n")
    rest = re.sub(r"(?s)<!--.*?-->|\*Measured on.*?\*\n", "", rest)
    paragraphs = (part.strip() for part in rest.split("\n\n"))
    prose = next((part for part in paragraphs if part[:1] not in "|#`!:-<*" and part), "")
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return title.removeprefix("# "), re.split(r"(?<=[.!?:])\s", prose, maxsplit=1)[0]


def index(made: Mapping[Path, str]) -> str:
    """Return llms.txt: a line for each page, of which some are not written yet."""
    lines = ["# Amanda", ""]
    lines += [
        "> Instrumentation of neural networks: write a tool once, and it sees and changes every"
    ]
    lines += [
        "> operator of any model of PyTorch, TensorFlow or JAX, without a change to its source.",
        "",
    ]
    for part, pages in _navigation():
        lines += [f"## {part}", ""]
        for page in pages:
            title, gist = _title_and_gist(made.get(page) or page.read_text("utf-8"))
            name = page.relative_to(ROOT / "docs").as_posix()
            lines.append(f"- [{title}]({URL}{name})" + (f": {gist}" if gist else ""))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def everything() -> str:
    """Return llms-full.txt: the pages themselves, without lists of names and measurements."""
    parts = []
    for _, pages in _navigation():
        for page in pages:
            name = page.relative_to(ROOT / "docs").as_posix()
            if not name.startswith(_LEFT_OUT):
                parts.append(f"<!-- docs/{name} -->\n\n{page.read_text('utf-8').strip()}\n")
    return "\n".join(parts)


def files(made: Mapping[Path, str]) -> dict[Path, str]:
    """Return what is committed: the index. The site has both.

    Args:
        made: Pages that are made of the sources, with their texts.
    """
    return {ROOT / "llms.txt": index(made)}
