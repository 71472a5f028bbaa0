"""Starts tools in a Python program that a program under `amanda run` has started.

The folder of this file is on PYTHONPATH of such programs, so the interpreter imports it before
anything of theirs. It costs next to nothing until a framework is imported, and the program's own
`sitecustomize` runs as without it.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Starter:
    """A finder that starts the tools when a framework is imported first."""

    amanda_children = True

    def __init__(self, frameworks: "list[str]") -> None:
        self._frameworks = frozenset(frameworks)

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name not in self._frameworks:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        try:
            from amanda_core.cli.starting import start

            start()
        except Exception as error:  # The import is the program's.
            text = f"{type(error).__name__}: {error}"
            print(
                f"amanda: error: process {os.getpid()} runs without tools: {text}", file=sys.stderr
            )
        import importlib.util

        if name in sys.modules:  # A tool has imported it.
            module = sys.modules[name]
            return importlib.util.spec_from_loader(name, _Loaded(module, module.__spec__))  # type: ignore[arg-type]
        # From the start, because the drivers watch imports now.
        return importlib.util.find_spec(name)


class _Loaded:
    """Loads a module that is loaded already."""

    def __init__(self, module: object, spec: object) -> None:
        self._module, self._spec = module, spec

    def create_module(self, spec: object) -> object:
        return self._module

    def exec_module(self, module: object) -> None:
        module.__spec__ = self._spec  # type: ignore[attr-defined]


def _start() -> None:
    given = os.environ.get("AMANDA_CHILDREN")
    if given:
        import json

        sys.meta_path.insert(0, _Starter(json.loads(given)["frameworks"]))  # type: ignore[arg-type]


def _run_own() -> None:
    """Import the `sitecustomize` that this file hides, if there is one."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    ours = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # The import system expects the module that it has loaded.
        sys.modules.setdefault(__name__, ours)


try:
    _start()
finally:
    _run_own()
