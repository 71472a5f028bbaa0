"""A model description as a Python program: one line, and so one place of call, for each op.

Owns the generated source. Drivers that distinguish ops by where they are called need real lines, in
a module that is neither the framework's nor Amanda's; an interpreting loop would have one line.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_core.testing.kit.models import Model, Node

__all__ = ["Program", "Scoped", "function_of", "source_of"]

#: Name of a module, the function that runs in it, and the modules inside it -> a function that
#: calls it as that module.
Scoped = Callable[[str, Callable[..., Any], Mapping[str, Callable[..., Any]]], Callable[..., Any]]


@dataclass
class Program:
    """A model built for a backend.

    Attributes:
        model: Its description.
        function: Takes the inputs and then the parameters; returns a tuple of outputs.
        parameters: The parameters, in the order of the description.
        extra: Whatever else a backend keeps of it.
    """

    model: Model
    function: Callable[..., Any]
    parameters: Sequence[Any]
    extra: Any = None


def _label(scope: str) -> str:
    return "in_" + scope.replace("/", "_")


def _body(nodes: Sequence[Node], scope: str) -> tuple[list[str], list[str]]:
    """Lines for the nodes of a scope and those below it, and the paths of its own scopes."""
    lines: list[str] = []
    inner: list[str] = []
    for node in nodes:
        if node.scope == scope:
            lines.append(f"{node.result} = {node.common_type}({', '.join(node.operands)})")
            continue
        below = node.scope[len(scope) + 1 if scope else 0 :].partition("/")[0]
        path = f"{scope}/{below}" if scope else below
        if path not in inner:
            inner.append(path)
            taken, made = _interface(nodes, path)
            lines.append(f"({', '.join(made)},) = {_label(path)}({', '.join(taken)})")
    return lines, inner


def _within(node: Node, scope: str) -> bool:
    return not scope or node.scope == scope or node.scope.startswith(f"{scope}/")


def _interface(nodes: Sequence[Node], scope: str) -> tuple[list[str], list[str]]:
    """Names that a scope reads from outside, and those that it makes."""
    inside = [node for node in nodes if _within(node, scope)]
    made = [node.result for node in inside]
    read = [name for node in inside for name in node.operands]
    return [name for name in dict.fromkeys(read) if name not in made], made


def _scopes(nodes: Sequence[Node]) -> list[str]:
    """Return all scopes, inner ones first."""
    found = dict.fromkeys(
        "/".join(parts[: depth + 1])
        for parts in (node.scope.split("/") for node in nodes if node.scope)
        for depth in range(len(parts))
    )
    return sorted(found, key=lambda path: -path.count("/"))


def source_of(model: Model) -> str:
    """Return the program's source.

    >>> from amanda_core.testing.kit.models import MODELS
    >>> print(source_of(MODELS["tied"]))
    def tied(x, w):
        h = mul(x, w)
        y = add(h, w)
        return (y,)
    """
    lines: list[str] = []
    for scope in _scopes(model.nodes):
        inside = [node for node in model.nodes if _within(node, scope)]
        taken, made = _interface(model.nodes, scope)
        body, _ = _body(inside, scope)
        lines.append(f"def {_label(scope)}({', '.join(taken)}):")
        lines += [f"    {line}" for line in body]
        lines += [f"    return ({', '.join(made)},)", ""]
    lines.append(f"def {model.name}({', '.join(model.inputs + model.parameters)}):")
    body, _ = _body(model.nodes, "")
    if model.times > 1:
        # Compilers of Python ask for it: the loop could run not once.
        lines.append(f"    {model.outputs[0]} = {model.inputs[0]}")
        lines.append(f"    for _ in range({model.times}):")
        lines += [f"        {line}" for line in body]
        lines.append(f"        {model.inputs[0]} = {model.outputs[0]}")
    else:
        lines += [f"    {line}" for line in body]
    lines.append(f"    return ({', '.join(model.outputs)},)")
    return "\n".join(lines)


def function_of(
    model: Model, functions: Mapping[str, Callable[..., Any]], scoped: Scoped
) -> Callable[..., Any]:
    """Return the program's function, which calls the framework's functions by common type names."""
    source = source_of(model)
    # No file below a package: drivers leave out their own frames, the core's and the framework's.
    filename = f"<model {model.name}>"
    # So that tracebacks, and frameworks that read sources, find the lines.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names: dict[str, Any] = {"__name__": f"amanda_model_{model.name}"}
    names.update((common_type, functions[common_type]) for common_type in model.common_types)
    exec(compile(source, filename, "exec"), names)
    scopes = _scopes(model.nodes)
    for scope in scopes:
        inner = {
            other.rpartition("/")[2]: names[_label(other)]
            for other in scopes
            if other.rpartition("/")[0] == scope
        }
        # Inner ones come first, so that the outer function calls what was made of them.
        names[_label(scope)] = scoped(scope.rpartition("/")[2], names[_label(scope)], inner)
    function: Callable[..., Any] = names[model.name]
    return function
