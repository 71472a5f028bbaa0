"""The names of Amanda that a driver may use, and the search for others in its sources.

Owns which modules are public for authors of drivers. Of each of them ``__all__`` is; what is not
named here may change in any release without a new `DRIVER_API`.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import amanda_core
from amanda_core.testing.checks.private_names import mentions, own_names

__all__ = ["PUBLIC_MODULES", "private_uses"]

#: Modules of the objects that a driver is given: their private attributes are never a driver's.
_GIVEN = (
    *("engine/action", "engine/context", "engine/plan", "engine/session", "engine/store"),
    *("engine/tool", "runtime/threads"),
)

#: Module -> what a driver finds there.
PUBLIC_MODULES: Mapping[str, str] = {
    "amanda_core.interface": "what a driver is: hooks, data types, facts, vocabulary, errors",
    "amanda_core.driver_kit": "what drivers may inherit",
}
#: What a driver may import: these, and the package itself for its path.
_IMPORTED = {"amanda_core", *PUBLIC_MODULES}


def private_uses(sources: Path) -> list[str]:
    """Return where Python sources use what is not public in Amanda, as ``file:line: name``.

    Args:
        sources: A folder, such as that of the driver's package.

    ``assert private_uses(Path(my_driver.__file__).parent) == []``
    """
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(sources.rglob("*.py"))}
    own, given = own_names(texts.values()), _private_attributes()
    found = []
    for path, text in texts.items():
        uses = [*_imports(ast.parse(text))]
        uses += [(use.line, use.name) for use in mentions(text, "amanda_core", own, theirs=given)]
        found += [f"{path}:{line}: {name}" for line, name in sorted(set(uses))]
    return found


def _private_attributes() -> frozenset[str]:
    core = Path(amanda_core.__file__).parent
    return own_names((core / f"{module}.py").read_text("utf-8") for module in _GIVEN)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_core(alias.name) and alias.name not in _IMPORTED:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and _is_core(node.module or "") and not node.level:
            for alias in node.names:
                if not _is_public(node.module or "", alias.name):
                    yield node.lineno, f"{node.module}.{alias.name}"


def _is_core(module: str) -> bool:
    return module.partition(".")[0] == "amanda_core"


def _is_public(module: str, name: str) -> bool:
    return module in _IMPORTED and name in importlib.import_module(module).__all__
