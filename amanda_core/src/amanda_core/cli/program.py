"""Executing a script or module as `__main__`, as the interpreter itself would.

Owns what a program can see of its start: `sys.argv`, `sys.path`, the module `__main__`, and the
traceback of an uncaught exception, which does not show frames of this file.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from amanda_core.plugins.tracebacks import VARIABLE, Folding, folded_modules

__all__ = ["Program", "report"]


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its arguments.

    Attributes:
        target: Path of a script, or of a folder or zip file with a ``__main__.py``; or the name of
            a module.
        arguments: The arguments that follow it on the command line.
        is_module: Whether it is a module (``-m``).
        is_command: Whether it is a script that was found on the PATH, such as ``torchrun``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_command: bool = False

    def found(self) -> Program | None:
        """Return the program if it is there, or a command in Python of its name; None if not."""
        if self.is_module or os.path.exists(self.target):
            return self
        path = None if os.path.dirname(self.target) else shutil.which(self.target)
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                start = file.read(512)
        except OSError:
            return None
        # Where the interpreter's path is long, pip writes it into the second line.
        if not start.startswith(b"#!") or b"python" not in start:
            return None
        return replace(self, target=path, is_command=True)

    @property
    def folder(self) -> Path:
        """The folder of a script, or the current one for modules and commands."""
        return Path.cwd() if self.is_module or self.is_command else self._folder

    @property
    def _folder(self) -> Path:
        path = Path(self.target).resolve()
        return path if path.is_dir() else path.parent

    @property
    def _importer(self) -> Any:
        """The importer of a folder or zip file; None for scripts and modules."""
        return None if self.is_module else pkgutil.get_importer(self._absolute)

    @property
    def _absolute(self) -> str:
        return os.path.abspath(self.target)

    def enter(self) -> None:
        """Set `sys.argv` and `sys.path` as the program expects them."""
        sys.argv = ["-m" if self.is_module else self.target, *self.arguments]
        safe = getattr(sys.flags, "safe_path", False) or bool(sys.flags.isolated)
        # The interpreter put this there for us: our own script's folder, or the current one.
        ours = {os.path.dirname(os.path.realpath(_ARGV0)), os.getcwd(), ""}
        if not safe and sys.path and sys.path[0] in ours:
            del sys.path[0]
        if self._importer is not None:
            sys.path.insert(0, self._absolute)  # The module `site` does this to the whole path.
        elif not safe:
            sys.path.insert(0, str(Path.cwd() if self.is_module else self._folder))

    def execute(self) -> None:
        """Execute it. Its exceptions propagate, SystemExit included."""
        module = ModuleType("__main__")
        spec: ModuleSpec | None = None
        if self.is_module:
            spec, code = _of_module(self.target)
            sys.argv[0] = spec.origin or self.target
        elif self._importer is not None:
            spec, code = _of_folder(self._absolute, self._importer)
        else:
            # As in CPython since 3.9: joined to the current folder, and otherwise unchanged.
            path = os.path.join(os.getcwd(), self.target)
            code = _of_file(path)
            module.__file__ = path
            module.__loader__ = SourceFileLoader("__main__", path)
        if spec is not None:
            module.__file__ = spec.origin
            module.__loader__ = spec.loader
            module.__package__ = spec.parent
            module.__spec__ = spec
        scope = module.__dict__
        scope["__builtins__"] = builtins
        scope["__cached__"] = spec.cached if spec is not None else None
        if sys.version_info < (3, 14):
            scope |= {"__annotations__": {}}
        # The old module stays alive, because its globals belong to the frames that called us.
        _kept.append(sys.modules["__main__"])
        sys.modules["__main__"] = module
        exec(code, scope)


#: Our own path, before it becomes the program's.
_ARGV0 = sys.argv[0] if sys.argv else ""
_kept: list[ModuleType] = []


def report(error: BaseException) -> None:
    """Show an uncaught exception through `sys.excepthook`, as the interpreter does.

    Frames that are not the program's are left out, which a line above says.
    """
    trace = _trimmed(error.__traceback__)
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    folding = Folding(error, folded_modules(wrappers=True))
    with folding.applied():
        shown = error.__traceback__
        if folding.left_out:
            with suppress(AttributeError, OSError, ValueError):
                print(
                    f"amanda: frames of Amanda and of the framework's wrappers left out below: "
                    f"{folding.left_out} ({VARIABLE}=full shows them)",
                    file=sys.stderr,
                    flush=True,
                )
        try:
            sys.excepthook(type(error), error, shown)
        except SystemExit:
            raise
        except BaseException as second:
            # The exception's own traceback is shown, if it has one.
            second.__traceback__ = _trimmed(second.__traceback__)
            print("Error in sys.excepthook:", file=sys.stderr)
            sys.__excepthook__(type(second), second, second.__traceback__)
            print("\nOriginal exception was:", file=sys.stderr)
            sys.__excepthook__(type(error), error, shown)


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if name != "runpy" and not name.startswith("amanda_core.cli."):
            break
        trace = trace.tb_next
    return trace


def _of_module(name: str) -> tuple[ModuleSpec, CodeType]:
    # pdb and the interpreter's own -m call this private function. It imports the parent packages,
    # finds __main__ of a package, and distinguishes mistakes in the name from errors inside the
    # module.
    try:
        _, spec, code = runpy._get_module_details(name, runpy._Error)  # type: ignore[attr-defined]
    except runpy._Error as error:  # type: ignore[attr-defined]
        _stop(str(error), 1)
    return spec, code


def _of_folder(path: str, importer: Any) -> tuple[ModuleSpec, CodeType]:
    spec: ModuleSpec | None = importer.find_spec("__main__")
    if spec is None or spec.loader is None:
        _stop(f"can't find '__main__' module in {path!r}", 1)
    loader: Any = spec.loader
    return spec, loader.get_code("__main__")


def _of_file(path: str) -> CodeType:
    try:
        with open(path, "rb") as file:
            compiled: CodeType | None = pkgutil.read_code(file)  # None unless it is a .pyc.
            if compiled is not None:
                return compiled
            file.seek(0)
            source = file.read()
    except OSError as error:
        _stop(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}", 2)
    return compile(source, path, "exec", dont_inherit=True)


def _stop(message: str, status: int) -> NoReturn:
    print(f"{sys.executable}: {message}", file=sys.stderr)
    raise SystemExit(status)
