"""No tool inspects values itself: it asks the driver through `context.facts`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import amanda_tools

#: A callback is of the class of the training library that the program has imported.
ABOUT_LIBRARIES = ("training", "libraries.py")
SOURCES = [
    path
    for path in sorted(Path(amanda_tools.__path__[0]).rglob("*.py"))
    if path.parts[-2:] != ABOUT_LIBRARIES
]
#: Attributes that distinguish the tensors of one framework from those of another.
_OF_TENSORS = frozenset(
    [
        *("detach", "numpy", "dtype", "shape", "device", "layout", "data_ptr", "untyped_storage"),
        *("requires_grad", "is_leaf", "is_sparse", "is_nested", "is_quantized", "is_meta"),
        *("_version", "_base", "nbytes", "itemsize", "__array__", "__torch_function__", "new_full"),
    ]
)


def guesses(source: str) -> Iterator[str]:
    """Yield where a source asks a value for an attribute of tensors, or for its framework."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
            yield f"{node.lineno}: sys.modules"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in _OF_TENSORS:
                yield f"{node.lineno}: {ast.unparse(node)}"
        # Where the class of a value comes from.
        if isinstance(node, ast.Attribute) and node.attr in ("__mro__", "__module__"):
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_tool_guesses(path: Path) -> None:
    assert list(guesses(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("hasattr(value, 'detach')", ["1: hasattr(value, 'detach')"]),
        ("x = getattr(v, 'device', None)", ["1: getattr(v, 'device', None)"]),
        ("'torch' in sys.modules", ["1: sys.modules"]),
        ("type(x).__mro__", ["1: type(x).__mro__"]),
        ("type(x).__module__ != 'numpy'", ["1: type(x).__module__"]),
        ("facts.device(value); getattr(op, 'graph', None)", []),
    ],
)
def test_a_guess_is_found(source: str, found: list[str]) -> None:
    assert list(guesses(source)) == found
