"""``python -m amanda_core.testing.kit.importing FILE CLASS``: apply tools, then import a framework.

Owns the program of a process in which no framework is loaded before. FILE defines a `Backend`,
whose import loads the framework. ``sys.path`` comes as JSON from standard input.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

from amanda_core.engine.activation import apply
from amanda_core.engine.context import OpContext
from amanda_core.engine.tool import Tool
from amanda_core.testing.kit.backend import Backend
from amanda_core.testing.kit.rig import Rig

__all__ = ["main"]


def main(file: str, name: str) -> None:
    """Run a model of the suite under a tool that was applied before its framework was imported.

    Raises:
        AssertionError: The model's operators were not seen.
    """
    executed: list[str] = []
    common_types: set[str] = set()

    def analyse(context: OpContext) -> None:
        common_type = context.get("type")
        if context.zone == "model" and common_type in common_types:
            context.insert_before_op(lambda *values: executed.append(str(common_type)))

    tool = Tool()
    tool.add_inst_for_op(analyse)
    with apply(tool):
        before = set(sys.modules)
        backend = _load(Path(file), name)
        with backend.registered():
            modules = set(backend.info().modules)
            assert not modules & before, f"{modules & before} was loaded before tools were applied"
            assert modules & set(sys.modules), f"{file} imports none of {modules}"
            built = Rig(backend, backend.info()).build("chain")
            common_types |= built.model.common_types
            built.run()
    assert executed == built.model.sequence, executed


def _load(file: Path, name: str) -> Backend:
    # In a package of its folder, so that it may import from beside it by a dot.
    package = ModuleType("amanda_backend")
    package.__path__ = [str(file.parent)]
    sys.modules[package.__name__] = package
    found = getattr(importlib.import_module(f"{package.__name__}.{file.stem}"), name)
    backend: Backend = found()
    return backend


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.stdin.read())
    main(*sys.argv[1:])
    print("instrumented")
