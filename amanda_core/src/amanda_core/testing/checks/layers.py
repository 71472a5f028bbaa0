"""The layers of a package: which of its modules may import which.

A package is read from top to bottom if its imports go one way. A test lists its layers, uppermost
first, and expects that `Layers.problems` finds none. All imports count, also those inside functions
and those for annotations. Run as a program, this module prints the table of the core's own layers.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["CORE", "Import", "Layers", "core"]

_ROOT = "__init__"

#: The rooms of the core, uppermost first.
CORE: Sequence[str | tuple[str, ...]] = (
    "testing",
    "cli",
    "config",
    _ROOT,
    ("driver_kit", "shorthands"),
    "engine",
    "plugins",
    "identity",
    "weights",
    ("modules", "results", "processes"),
    "interface",
    "runtime",
    "errors",
)


class Import(NamedTuple):
    """An import of one module of a package by another, by their names inside the package."""

    importer: str
    imported: str
    line: int


class Layers:
    """The modules of a package in layers.

    Attributes:
        modules: The modules by their names inside the package, such as ``eager.sites``. A
            subpackage's own module has the subpackage's name; that of the whole is ``__init__``.
        imports: All imports of one of them by another.
    """

    def __init__(
        self,
        package: Path,
        layers: Sequence[str | tuple[str, ...]],
        concepts: Collection[str] = (),
    ) -> None:
        """Read the sources of a package.

        Args:
            package: The folder of the package.
            layers: Modules and subpackages, uppermost first. Those in one tuple are side by side
                and do not import one another. Inside a subpackage only cycles are refused.
            concepts: Subpackages whose modules are one concept, so that they may import one another
                in a circle.
        """
        self._concepts = tuple(concepts)
        self.modules = {_name_of(path, package): path for path in sorted(package.rglob("*.py"))}
        self._package = package.name
        self._layers = [(names,) if isinstance(names, str) else names for names in layers]
        self.imports = [found for name in self.modules for found in self._imports_of(name)]
        self._following: dict[str, set[str]] = {name: set() for name in self.modules}
        for one in self.imports:
            self._following[one.importer].add(one.imported)

    def problems(self) -> list[str]:
        """Return a sentence for each import that does not go down, and for each cycle."""
        listed = [name for names in self._layers for name in names]
        return [
            *(f"{name} is in no layer" for name in self.modules if self._place(name) is None),
            *(f"{name} is listed, but there is no such module" for name in self._absent(listed)),
            *(
                f"{one.importer}:{one.line} imports {one.imported}, which is not below it"
                for one in self.upward()
            ),
            *(f"These import one another in a circle: {', '.join(c)}" for c in self.circles()),
        ]

    def upward(self) -> list[Import]:
        """Return the imports of a module from a layer above or beside."""
        return [one for one in self.imports if self._is_upward(one)]

    def circles(self) -> list[list[str]]:
        """Return the largest import cycles outside of the concepts: sets of modules that all reach
        each other.
        """
        reached = {name: self._reached_from(name) for name in self.modules}
        circles = {
            tuple(sorted(other for other in reached[name] if name in reached[other]))
            for name in self.modules
            if name in reached[name]
        }
        return [list(circle) for circle in sorted(circles) if not self._is_concept(circle)]

    def table(self) -> str:
        """Return the layers, uppermost first, and how often each imports from each other."""
        names = [name for names in self._layers for name in names]
        counts = Counter(
            (above[1], below[1])
            for one in self.imports
            if (above := self._place(one.importer)) and (below := self._place(one.imported))
        )
        modules = Counter(place[1] for name in self.modules if (place := self._place(name)))
        rows = [
            [name, str(modules[name]), *(str(counts[name, other] or ".") for other in names)]
            for name in names
        ]
        columns = ["imports", "files", *names]
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in [columns, *rows]
        ]
        up, circles = len(self.upward()), len(self.circles())
        allowed = f" outside of {', '.join(self._concepts)}" if self._concepts else ""
        return "\n".join([*lines, f"upward imports: {up}; circles{allowed}: {circles}"])

    def _is_concept(self, circle: Sequence[str]) -> bool:
        return any(all(_is_in(name, concept) for name in circle) for concept in self._concepts)

    def _absent(self, listed: Sequence[str]) -> list[str]:
        return [n for n in listed if not any(_is_in(module, n) for module in self.modules)]

    def _place(self, module: str) -> tuple[int, str] | None:
        """Return the index of a module's layer and the listed name that it belongs to."""
        places = [
            (number, name)
            for number, names in enumerate(self._layers)
            for name in names
            if _is_in(module, name)
        ]
        return max(places, key=lambda place: len(place[1]), default=None)

    def _is_upward(self, found: Import) -> bool:
        importer, imported = self._place(found.importer), self._place(found.imported)
        if importer is None or imported is None or importer == imported:
            return False
        return imported[0] <= importer[0]

    def _reached_from(self, module: str) -> set[str]:
        found: set[str] = set()
        queue = [module]
        while queue:
            following = self._following[queue.pop()] - found
            found |= following
            queue.extend(following)
        return found

    def _imports_of(self, module: str) -> Iterator[Import]:
        path = self.modules[module]
        inside = [self._package, *([] if module == _ROOT else module.split("."))]
        if path.name != "__init__.py":
            inside.pop()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for candidates in _candidates(node, inside):
                imported = next(filter(None, map(self._module_of, candidates)), None)
                if imported is not None and imported != module:
                    yield Import(module, imported, getattr(node, "lineno", 0))

    def _module_of(self, dotted: str) -> str | None:
        package, _, name = dotted.partition(".")
        name = name or _ROOT
        return name if package == self._package and name in self.modules else None


def _name_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == _ROOT else parts) or _ROOT


def _is_in(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _candidates(node: ast.AST, inside: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return for each import of a statement the modules that it may mean, the likeliest first."""
    if isinstance(node, ast.Import):
        yield from ((alias.name,) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        origin = node.module or ""
        if node.level:
            outer = inside[: len(inside) - node.level + 1]
            origin = ".".join([*outer, *([node.module] if node.module else [])])
        yield from ((f"{origin}.{alias.name}", origin) for alias in node.names)
    elif isinstance(node, ast.Call) and node.args:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        function = node.func.id if isinstance(node.func, ast.Name) else function
        first = node.args[0]
        if function in ("import_module", "__import__") and isinstance(first, ast.Constant):
            yield (str(first.value),)


def core() -> Layers:
    """Return the layers of the core itself, in which the engine is one concept."""
    return Layers(Path(__file__).parents[2], CORE, concepts=["engine"])


if __name__ == "__main__":
    checked = core()
    print(checked.table(), *checked.problems(), sep="\n")
    raise SystemExit(bool(checked.problems()))
