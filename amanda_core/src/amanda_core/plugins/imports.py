"""Callbacks for imports: of a module that is not loaded yet, and at the end of a running import.

Owns the finder that watches for modules. It is in ``sys.meta_path`` only while somebody watches,
and a module imported through it keeps its own loader. An import ends when Python marks the spec as
initialised.
"""

from __future__ import annotations

import _frozen_importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["EndOfImport", "ImportWatcher", "running_imports"]

#: The function that runs the import of one module, whose spec is its local variable `spec`.
_LOAD = getattr(getattr(_frozen_importlib, "_load_unlocked", None), "__code__", None)


def running_imports() -> list[ModuleSpec]:
    """Return the specs of the imports that run in this thread, the outermost first."""
    found = []
    frame = sys._getframe(1) if _LOAD is not None else None
    while frame is not None:
        if frame.f_code is _LOAD:
            found.append(frame.f_locals["spec"])
        frame = frame.f_back
    return found[::-1]


class EndOfImport:
    """Calls back once, when a running import has ended or failed.

    Args:
        spec: One of `running_imports`. For a spec of another class there is no callback.
        callback: Called in the thread of the import.
    """

    def __init__(self, spec: ModuleSpec, callback: Callable[[], None]) -> None:
        self._spec, self._callback = spec, callback
        if type(spec) is ModuleSpec:
            spec.__class__ = _HeardSpec
            spec.__dict__["_heard_by"] = []
        if isinstance(spec, _HeardSpec):
            spec._heard_by.append(self)

    def cancel(self) -> None:
        """Cancel the callback; may be called more than once."""
        if isinstance(self._spec, _HeardSpec):
            self._spec._heard_by[:] = [end for end in self._spec._heard_by if end is not self]
            if not self._spec._heard_by:
                self._spec.restore()

    def tell(self) -> None:
        """Call the callback: the import has ended."""
        self._callback()


class _HeardSpec(ModuleSpec):
    """The class of a spec while the end of its import is awaited."""

    _heard_by: list[EndOfImport]

    def restore(self) -> list[EndOfImport]:
        """Make it an ordinary spec again, and return those who waited."""
        waiting: list[EndOfImport] = self.__dict__.pop("_heard_by")
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        return waiting

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            for end in self.restore():
                end.tell()


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
        """Start watching."""
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Stop watching; may be called more than once."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find `fullname` through the other finders and wrap its loader."""
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
        """Call back for `name`, unless watching has stopped."""
        if self in sys.meta_path:
            self._callback(name)


class _TellingLoader(Loader):
    def __init__(self, loader: Loader, watcher: ImportWatcher, name: str) -> None:
        self._loader, self._watcher, self._name = loader, watcher, name

    def __getattr__(self, name: str) -> Any:
        # Code that runs a module without importing it uses more of the loader (runpy: get_code).
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
