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
from amanda_core.testing.private_names import mentions, own_names

__all__ = ["PUBLIC_MODULES", "private_uses"]

#: Modules of the objects that a driver is given: their private attributes are never a driver's.
_GIVEN = ("action", "context", "plan", "session", "store", "threads", "tool")

#: Module -> what a driver finds there.
PUBLIC_MODULES: Mapping[str, str] = {
    "amanda_core": "the data types of the interface, sessions, contexts and plans",
    "amanda_core.facts": "facts about tensors, which a driver provides for tools",
    "amanda_core.errors": "errors, each with a slug, and notes on errors of others",
    "amanda_core.declarations": "what a driver declares in a table instead of in code",
    "amanda_core.declared_hooks": "the hooks of a driver with such a table",
    "amanda_core.execution": "parts of the execution of an op that drivers share",
    "amanda_core.frame_locals": "a local variable of a running function, leaving no copy",
    "amanda_core.immutable_parameters": "weights of frameworks whose arrays are never written",
    "amanda_core.marks": "routines of tools that a driver may record without calling them",
    "amanda_core.module_paths": "paths of the modules inside a module",
    "amanda_core.contiguous_memory": "where tensors without strides lie",
    "amanda_core.path_modules": "where modules run that programs make again at each call",
    "amanda_core.path_sites": "the rule of identity for modules that are known by their paths",
    "amanda_core.patching": "attributes replaced while a session needs it",
    "amanda_core.imports": "callbacks for a framework that is imported later",
    "amanda_core.interceptors": "the choice between a native interceptor and one in Python",
    "amanda_core.framework_versions": "versions of a framework: tried, untried, refused",
    "amanda_core.driver_failures": "operators at which the driver itself fails",
    "amanda_core.identity": "op ids, and positions of call sites",
    "amanda_core.sites": "the rule that finds the op to which a call of an operator belongs",
    "amanda_core.zones": "the part of a program that runs, by the modules of its frames",
    "amanda_core.scopes": "paths of modules, and names of their weights",
    "amanda_core.weights.geometry": "the memory of a tensor, and the part of a parameter in it",
    "amanda_core.weights.parameters": "functions of a driver about tensors, to find parameters",
    "amanda_core.weights.reads": "the weights that an operator reads",
    "amanda_core.weights.state": "routines whose results a driver may use again",
    "amanda_core.weak": "remembering values without keeping them alive",
    "amanda_core.threads": "the switches of the control API in one thread",
    "amanda_core.switches": "positions in the buffer of these switches",
    "amanda_core.vocabulary": "the common operator types and the roles of inputs",
    "amanda_core.calls": "operators for the inputs and outputs of modules",
    "amanda_core.namespace": "namespaces and patterns of them",
    "amanda_core.activation": "applying tools, such as for a self-test",
    "amanda_core.warning_locations": "warnings that point to a line of the program",
    "amanda_core.discovery": "registering a driver that is not installed",
}


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
                if _is_core(alias.name) and alias.name not in PUBLIC_MODULES:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and _is_core(node.module or "") and not node.level:
            for alias in node.names:
                if not _is_public(node.module or "", alias.name):
                    yield node.lineno, f"{node.module}.{alias.name}"


def _is_core(module: str) -> bool:
    return module.partition(".")[0] == "amanda_core"


def _is_public(module: str, name: str) -> bool:
    if f"{module}.{name}" in PUBLIC_MODULES or name in amanda_core.__all__:
        return True
    return module in PUBLIC_MODULES and name in importlib.import_module(module).__all__
