"""Functions that write, read, export or trace a model: their operators are none of the model's.

Owns how a driver finds them by name and replaces them. The driver knows their names, and keeps
their operators from being seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from amanda_core.driver_kit.patching import Patches, made_once
from amanda_core.plugins.imports import ImportWatcher

__all__ = ["ModelWriters"]

Function = Callable[..., Any]


class ModelWriters:
    """Functions of a framework and its libraries that write, read, export or trace a model.

    Attributes:
        modules: The modules that have them, which need not be imported or installed.

    Args:
        others: Module -> the functions, also as ``Class.method``, that write nothing for others.
        writers: Module -> a function that writes the model for others -> what programs call it.
        wrap: Returns what replaces a function, given it and what programs call it, or "".
        required: Modules that must have all functions that are named. Others may lack some, as
            those of other releases do.
    """

    def __init__(
        self,
        others: Mapping[str, Sequence[str]],
        writers: Mapping[str, Mapping[str, str]],
        wrap: Callable[[Function, str], Function],
        required: Sequence[str] = (),
    ) -> None:
        self._others, self._writers = others, writers
        self._wrap = made_once(wrap)
        self._required = required
        self.modules = tuple(dict.fromkeys((*others, *writers)))
        #: The modules whose import was complete.
        self._complete: dict[str, ModuleType] = {}

    def of(self, *modules: str) -> Iterator[tuple[Any, str, Any]]:
        """Yield the owner, the name and the replacement of each function of imported modules."""
        for module in modules:
            functions = dict.fromkeys(self._others.get(module, ()), "")
            for path, writer in {**functions, **self._writers.get(module, {})}.items():
                *owners, name = path.split(".")
                owner: Any = sys.modules[module]
                for part in owners:
                    owner = getattr(owner, part, None)
                original = None if owner is None else vars(owner).get(name)
                if original is None and module in self._required:
                    raise AttributeError(f"{module} has no {path}")
                if isinstance(original, (classmethod, staticmethod)):
                    kind: Any = type(original)
                    yield owner, name, kind(self._wrap(original.__func__, writer))
                elif original is not None:
                    yield owner, name, self._wrap(original, writer)

    def replace(self, patches: Patches) -> None:
        """Replace the functions, now or once their modules are imported."""

        def imported(module: str) -> None:
            for owner, name, replacement in self.of(module):
                patches.replace(owner, name, replacement)

        waiting = [name for name in self.modules if name not in sys.modules]
        watcher = ImportWatcher(waiting, imported)
        patches.afterwards(watcher.stop)
        watcher.start()
        ready = []
        for name in self.modules:
            if (module := sys.modules.get(name)) is None:
                continue
            if self._complete.get(name) is module:
                ready.append(name)
            elif getattr(getattr(module, "__spec__", None), "_initializing", False):
                imported(name)  # It may lack functions that it will have in the next session.
            else:
                self._complete[name] = module
                ready.append(name)
        patches.replace_found(self.of, *ready)
