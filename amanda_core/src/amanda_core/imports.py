"""Hearing of the import of a module that is not loaded yet, without importing it.

Owns the one finder that does so. It stands in ``sys.meta_path`` only while somebody watches, and
a module imported under it keeps its own loader.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ImportWatcher"]


class ImportWatcher(MetaPathFinder):
    """Calls back after one of some modules has been imported.

    Args:
        names: Fully qualified names of the modules to wait for.
        callback: Called with the name, after the module has been executed.
    """

    def __init__(self, names: Sequence[str], callback: Callable[[str], None]) -> None:
        self._names = frozenset(names)
        self._callback = callback
        self._searching: set[str] = set()

    def start(self) -> None:
        """Begin to watch."""
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Cease to watch; may be called more than once."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find `fullname` through the other finders, and wrap its loader."""
        if fullname not in self._names or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _TellingLoader(spec.loader, self, fullname)
        return spec

    def tell(self, name: str) -> None:
        """Pass on that `name` was imported, unless nobody watches any more."""
        if self in sys.meta_path:
            self._callback(name)


class _TellingLoader(Loader):
    def __init__(self, loader: Loader, watcher: ImportWatcher, name: str) -> None:
        self._loader, self._watcher, self._name = loader, watcher, name

    def __getattr__(self, name: str) -> Any:
        # What runs a module instead of importing it asks the loader for more (runpy: get_code).
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Before executing: the module may look at its own loader (resources, pickling).
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._watcher.tell(self._name)
