"""Private names and releases of a framework in the sources of its driver.

A private name may be gone in the next release of the framework. So a driver names all of them in
one module, which its author checks against each release. A test of the driver searches its other
`DriverSources` and expects to find none, nor what holds for some releases only. Owns the search;
the caller defines what is private, and how numbers of releases look.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import amanda_core

__all__ = [
    "DriverSources",
    "Mention",
    "has_underscore",
    "mentions",
    "mentions_in_c",
    "own_names",
]

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)*\.?")
_C_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')

_LOOK_UPS = ("delattr", "getattr", "hasattr", "setattr")

#: Names with an underscore that Python itself documents.
_PYTHONS = frozenset({"_asdict", "_fields", "_getframe", "_make", "_replace"})


class Mention(NamedTuple):
    """A private name in a source: the line, and the name as far as it is known."""

    line: int
    name: str


def has_underscore(dotted: str) -> bool:
    """Return True if a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def own_names(sources: Iterable[str]) -> frozenset[str]:
    """Return the names with an underscore that Python sources define or assign themselves."""
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            found.update(name for name in _defined(node) if name.startswith("_"))
    return frozenset(found)


def mentions(
    source: str,
    framework: str,
    own: Collection[str],
    is_private: Callable[[str], bool] = has_underscore,
    theirs: Collection[str] = (),
) -> list[Mention]:
    """Return the private names of a framework in a Python source, with their lines.

    Args:
        source: The source.
        framework: Top-level module of the framework.
        own: Names with an underscore that the driver defines, as `own_names` returns them.
        is_private: Tells whether a dotted name that begins with `framework` is private.
        theirs: Names with an underscore that objects of the framework have. One that is in `own`,
            too, is the driver's only as an attribute of `self` or `cls`.
    """
    return sorted(set(_Search(framework, own, is_private, theirs).of(ast.parse(source))))


def mentions_in_c(source: str, framework: str, own: Collection[str]) -> list[Mention]:
    """Return the string literals of a C or C++ source that are private names of a framework."""
    return [
        Mention(number, text)
        for number, line in enumerate(source.splitlines(), 1)
        if not line.lstrip().startswith(("//", "#include"))
        for text in _C_STRING.findall(line)
        if _is_private_text(text, framework, own, has_underscore)
    ]


class DriverSources:
    """The sources of a driver, and the private names of its framework in them.

    Attributes:
        texts: Path below the driver's package -> source, in Python, C and C++.
    """

    def __init__(
        self,
        package: Path,
        framework: str,
        is_private: Callable[[str], bool] = has_underscore,
        theirs: Collection[str] = (),
    ) -> None:
        """Read the sources below `package`; see `mentions` for the other arguments."""
        self.texts = {
            path.relative_to(package).as_posix(): path.read_text("utf-8")
            for path in sorted(package.rglob("*"))
            if path.suffix in (".py", ".c", ".cpp", ".h")
        }
        core = Path(amanda_core.__file__).parent.rglob("*.py")
        driver = [text for name, text in self.texts.items() if name.endswith(".py")]
        self._own = own_names([*driver, *(path.read_text("utf-8") for path in core)])
        self._framework, self._is_private, self._theirs = framework, is_private, theirs

    def mentions(self, name: str, text: str | None = None) -> list[str]:
        """Return the private names in a source as ``path:line: name``.

        Args:
            name: The path of the source below the driver's package.
            text: Searched in its place, if it is given.
        """
        text = self.texts[name] if text is None else text
        if name.endswith(".py"):
            found = mentions(text, self._framework, self._own, self._is_private, self._theirs)
        else:
            found = mentions_in_c(text, self._framework, self._own)
        return [f"{name}:{line}: {private}" for line, private in found]

    def releases(self, name: str, numbers: str, text: str | None = None) -> list[str]:
        """Return where a source names a release, also in comments, or reads ``__version__``.

        A version that is only put into an f-string is shown, and decides nothing.

        Args:
            name: The path of the source below the driver's package.
            numbers: A regular expression that finds numbers of releases.
            text: Searched in its place, if it is given.

        Returns:
            The places as ``path:line: what``.
        """
        text = self.texts[name] if text is None else text
        found = [
            Mention(number, match.group())
            for number, line in enumerate(text.splitlines(), 1)
            for match in re.finditer(numbers, line)
        ]
        tree = ast.parse(text if name.endswith(".py") else "")
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.FormattedValue))
        shown = {id(node.value) for node in texts}
        found += [
            Mention(node.lineno, ast.unparse(node))
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr == "__version__"
            and id(node) not in shown
        ]
        return [f"{name}:{line}: {what}" for line, what in sorted(found)]


class _Search:
    def __init__(
        self,
        framework: str,
        own: Collection[str],
        is_private: Callable[[str], bool],
        theirs: Collection[str],
    ) -> None:
        self._framework, self._is_private = framework, is_private
        self._own, self._only_own = own, frozenset(own).difference(theirs)
        #: Names in this source -> the parts of the framework that they refer to.
        self._stands_for: dict[str, str] = {}

    def of(self, tree: ast.Module) -> Iterator[Mention]:
        passed_over = {id(node) for node in (*_docstrings(tree), *_slots(tree))}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from self._imported(node)
        looked_up = {id(node) for node in _looked_up(tree)}
        inner: set[int] = set()
        for node in ast.walk(tree):  # Outer nodes come before those inside them.
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                inner.update(id(each) for each in _chain(node)[1])
                yield from self._of_chain(node)
            elif isinstance(node, ast.Constant) and id(node) not in passed_over:
                text = node.value if isinstance(node.value, str) else ""
                own = self._only_own if id(node) in looked_up else self._own
                if _is_private_text(text, self._framework, own, self._is_private):
                    yield Mention(node.lineno, text)

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[Mention]:
        origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            full = origin + alias.name
            if full.partition(".")[0] != self._framework:
                continue
            if isinstance(node, ast.Import) and alias.asname is None:
                self._stands_for[self._framework] = self._framework
            else:
                self._stands_for[alias.asname or alias.name] = full
            if self._is_private(full):
                yield Mention(node.lineno, full)

    def _of_chain(self, node: ast.Attribute) -> Iterator[Mention]:
        base, attributes = _chain(node)
        names = [each.attr for each in reversed(attributes)]
        root = self._stands_for.get(base.id) if isinstance(base, ast.Name) else None
        if root is not None:
            full = ".".join([root, *names])
            if self._is_private(full) and not self._is_private(root):
                yield Mention(node.lineno, full)
            names = [] if not self._is_private(root) else names
        of_self = isinstance(base, ast.Name) and base.id in ("self", "cls")
        for position, name in enumerate(names):
            own = self._own if of_self and position == 0 else self._only_own
            if has_underscore(name) and name not in own and not _is_known(name):
                yield Mention(node.lineno, f"….{name}")


def _chain(node: ast.Attribute) -> tuple[ast.expr, list[ast.Attribute]]:
    """Return what ``a`` in ``a.b.c`` is, and the attributes from the last to the first."""
    attributes = [node]
    while isinstance(attributes[-1].value, ast.Attribute):
        attributes.append(attributes[-1].value)
    return attributes[-1].value, attributes


def _is_private_text(
    text: str, framework: str, own: Collection[str], is_private: Callable[[str], bool]
) -> bool:
    if not _DOTTED.fullmatch(text):
        return False
    name = text.rstrip(".")
    if name.partition(".")[0] == framework:
        return is_private(name)
    if name.startswith("amanda"):
        return False
    return any(
        has_underscore(part) and part not in own and not _is_known(part) for part in name.split(".")
    )


def _is_known(name: str) -> bool:
    # A driver marks objects of its framework by names such as `_amanda_source`.
    return name in _PYTHONS or name.startswith("_amanda_") or not name.strip("_")


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr):
                yield first.value


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        # What is assigned to another object may be that object's own.
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node.attr
    elif isinstance(node, ast.Assign):
        yield from (slot.value for slot in _slots(node) if isinstance(slot.value, str))
    elif isinstance(node, ast.alias):
        yield node.asname or node.name


def _looked_up(tree: ast.Module) -> Iterator[ast.expr]:
    """Return the arguments that name an attribute of another object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _LOOK_UPS:
            yield from node.args[1:2]


def _slots(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from (each for each in ast.walk(node.value) if isinstance(each, ast.Constant))
