"""Paths of the modules inside a module, for frameworks in which each holds others by name.

Drivers import it; the engine does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["inside", "modules_of"]


def inside(path: str, name: str) -> str:
    """Return the path of what is held by `name` at a path, which is empty for the outermost."""
    return f"{path}.{name}" if path else name


def modules_of(
    module: Any, children_of: Callable[[Any], Mapping[str, Any]], path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the path of a module and of each one inside it, with the module; each once.

    Args:
        module: The outermost module.
        children_of: Returns the modules that a module holds, by name. A value may be None.
        path: That of the outermost module.
    """
    waiting, seen = [(path, module)], {id(module)}
    while waiting:
        path, module = waiting.pop()
        yield path, module
        for name, child in children_of(module).items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append((inside(path, name), child))
