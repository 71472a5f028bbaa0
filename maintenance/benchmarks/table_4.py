"""Count the lines of the pruning tools beside those of the paper's Table 4.

    python -m maintenance.benchmarks.table_4

A tool's lines are those of its modules. A module that at least three tools of this package use is
shared: it is listed, and not counted for one of them. Physical lines are all lines of the formatted
files; source lines are those without blank lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "amanda_tools" / "src" / "amanda_tools"


class Project(NamedTuple):
    """A row: its name, the lines of users' code and of Amanda's tool in the paper, our modules."""

    name: str
    users: int
    amanda: int
    modules: tuple[str, ...]


PROJECTS = [
    Project("tile-wise (TW, TEW)", 1203, 213, ("prune/tilewise.py",)),
    Project("dynamic channels (FBS)", 387, 115, ("gating/channels.py",)),
    Project("activations (DynConv)", 650, 193, ("gating/positions.py",)),
    Project("attention (Block-skim)", 1105, 179, ("gating/blocks.py",)),
    Project("vector-wise (APEX)", 499, 279, ("prune/vectorwise.py",)),
]
#: Shared modules, with the tools that use them.
SHARED = {
    **{
        f"prune/{name}.py": "prune, prune_nm, prune_tiles"
        for name in ("scores", "pruning", "reads", "order", "masks", "macs", "result")
    },
    "gating/gates.py": "prune_channels, prune_positions, prune_attention",
    "gating/result.py": "prune_channels, prune_positions, prune_attention",
    "kit/weights/learned_parameters.py": "the same and quantize",
    "kit/weights/tool.py": "all of these and quantize",
    "kit/weights/files.py": "all of these and quantize",
    "kit/weights/coverage.py": "prune, prune_nm, prune_tiles, quantize",
    "kit/weights/baking.py": "prune, prune_nm, prune_tiles, quantize",
}


def physical(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def source(path: Path) -> int:
    """Return the number of lines of a file that hold code."""
    text = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            text_of = node.body[0]
            lines -= set(range(text_of.lineno, (text_of.end_lineno or 0) + 1))
    return len(lines)


def counts(modules: Iterable[str]) -> tuple[int, int]:
    """Return the source and physical lines of modules."""
    paths = [TOOLS / module for module in modules]
    return sum(map(source, paths)), sum(map(physical, paths))


def tables() -> str:
    """Return the two tables in Markdown."""
    rows = [
        "| project | users' code, paper | Amanda's tool, paper | source | physical | modules |",
        "|---|---|---|---|---|---|",
    ]
    for project in PROJECTS:
        lines, whole = counts(project.modules)
        modules = ", ".join(f"`{module}`" for module in project.modules)
        rows.append(
            f"| {project.name} | {project.users} | {project.amanda} | {lines} | {whole} "
            f"| {modules} |"
        )
    rows += ["", "| shared module | source | physical | used by |", "|---|---|---|---|"]
    for module, users in SHARED.items():
        lines, whole = counts([module])
        rows.append(f"| `{module}` | {lines} | {whole} | {users} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(tables())
