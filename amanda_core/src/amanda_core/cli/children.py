"""Programs that a program under `amanda run` starts, such as the ranks of a launcher.

Owns what they are told, in the environment, and how they end: without `amanda run`, by the
interpreter's own means. Forks are not among them: they run without tools.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from amanda_core.cli.running import Run
from amanda_core.errors import OutputError
from amanda_core.plugins import discovery
from amanda_core.processes.launched import Process
from amanda_core.results.output import Output
from amanda_core.runtime.containment import described
from amanda_core.runtime.started_processes import VARIABLE

__all__ = ["VARIABLE", "Child", "disown", "process_of", "told"]

_PATH = "PYTHONPATH"
_STARTUP = str(Path(__file__).with_name("startup"))
#: How many processes without a rank may have results.
_MOST = 10_000


@contextmanager
def told(run: Run, options: Mapping[str, Any]) -> Iterator[None]:
    """Let programs that are started in this block run under the tools of a run.

    Args:
        run: The run.
        options: The flags of `amanda run`.
    """
    frameworks = chain.from_iterable(driver.info.modules for driver in discovery.drivers())
    content = {
        "options": dict(options),
        "program": [run.program.target, run.program.is_module],
        "where": os.getcwd(),
        "folder": str(run.output.folder),
        "rank": run.process.rank,
        "run": run.number,
        "frameworks": list(frameworks),
    }
    earlier = {name: os.environ.get(name) for name in (VARIABLE, _PATH)}
    os.environ[VARIABLE] = json.dumps(content)
    others = (earlier[_PATH] or "").split(os.pathsep)
    os.environ[_PATH] = os.pathsep.join([_STARTUP, *(one for one in others if one != _STARTUP)])
    try:
        yield
    finally:
        for name, value in earlier.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def disown() -> None:
    """Let this process not be a child of a run, but begin one of its own."""
    os.environ.pop(VARIABLE, None)
    kept = [one for one in sys.meta_path if not getattr(one, "amanda_children", False)]
    sys.meta_path[:] = kept


@dataclass
class Child(Run):
    """A program that another one has started, and that the interpreter runs.

    Attributes:
        folder: The folder of the run's results.
        names: The names of the results.
        force: Whether to replace earlier results.
        known: The rank of the process that started it, whose variables it has inherited.
    """

    folder: Path = field(default_factory=Path)
    names: Sequence[str] = ()
    force: bool = False
    known: int | None = None
    _thread: int = field(default_factory=threading.get_ident, init=False)
    #: Which process it was when it began.
    _began_as: Process = field(default=Process(None, "", None), init=False)

    def begin(self) -> None:
        """Apply the tools until the process ends."""
        # Libraries remove what they have set once their work is done.
        self._began_as = process_of(self.known)
        self.attach()
        if threading.current_thread() is threading.main_thread():
            self._termination.start()
        self._saving.start()
        # What is registered later runs earlier: the first finalizer registers all of them, and
        # frameworks take their operators away in theirs.
        weakref.finalize(self, int).detach()
        self._register()
        # Modules that the program imports after this register later, and need not work any more.
        getattr(threading, "_register_atexit", lambda call: None)(self._register)

    def _register(self) -> None:
        """Make `_at_exit` the next function that runs at exit."""
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        problem = f"ended by {described(error)}" if error is not None else ""
        self.finish(problem, unwound=threading.get_ident() == self._thread)
        if self._thread == threading.main_thread().ident:
            self._termination.stop()

    def _is_open(self) -> bool:
        """Reserve a folder for results, if there are any; helpers of frameworks have none."""
        if self._opened or not self._has_operators():
            return self._opened
        found = process_of(self.known)
        self.process = found if found.rank is not None else self._began_as
        self._state.rank, self._state.processes = self.process.rank, self.process.processes
        problem = "it is in use"
        for part in [self.process.part] if self.process.part else _numbered():
            try:
                self.output = Output(self.folder, self.names, part=part, force=self.force)
                self._opened = self.output.reserve()
            except OutputError as error:
                problem = str(error)
            if self._opened:
                self._note()
                return True
        if not self._told:
            self._told = True
            self._fail(f"no results of process {self._pid} are written: {problem}")
        return False


def process_of(known: int | None) -> Process:
    """Return this process, unless the variables are those of the process that started it.

    Args:
        known: The rank of that process.
    """
    found = Process.of_environment()
    return Process(None, "", None) if found.rank is None or found.rank == known else found


def _numbered() -> Iterator[str]:
    """Yield names of folders for a process without a rank."""
    if number := re.search(r"\d+$", multiprocessing.current_process().name):
        yield f"process-{number[0]}"
    yield from (f"process-{number}" for number in range(1, _MOST))
