"""How many lines of Python are code, for tests that keep a package small."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

__all__ = ["lines_of_code", "lines_of_package"]

_IGNORED = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def lines_of_code(source: str) -> int:
    r"""Return how many lines are neither blank, comment nor docstring.

    >>> lines_of_code('"Doc."\n\n# Why.\nx = 1\n')
    1
    """
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _IGNORED and token.string
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - documented)


def lines_of_package(folder: Path) -> int:
    """Return how many lines of all Python files in a folder are code."""
    return sum(lines_of_code(path.read_text("utf-8")) for path in folder.rglob("*.py"))
