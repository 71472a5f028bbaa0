"""Python programs that a program starts by `subprocess` or `multiprocessing`, counted.

Owns the replacements of what starts them, which are there while somebody counts. Forks are counted
where they end.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["VARIABLE", "StartedProcesses", "is_program"]

#: Tells Python programs that a program under `amanda run` starts what they are to do.
VARIABLE = "AMANDA_CHILDREN"
_PYTHON = re.compile(r"python[\d.]*(\.exe)?")
_LIBRARIES = os.path.dirname(os.__file__) + os.sep
_SITE = f"{os.sep}site-packages{os.sep}"


class StartedProcesses:
    """Counts the Python programs that are started between `begin` and `end`, but for those that
    `amanda run` has told to apply the tools.

    Args:
        note: Called for each.
        forks: Returns how many forks there were so far, which are counted elsewhere.
    """

    def __init__(self, note: Callable[[], object], forks: Callable[[], int]) -> None:
        self._note, self._forks = note, forks
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        #: Originals that were met, each with what replaces it.
        self._made: dict[Any, Any] = {}

    def begin(self) -> None:
        """Replace what starts processes, unless it is replaced already."""
        if self._replaced:
            return
        for module, kind, name, wrap in (
            ("subprocess", "Popen", "__init__", self._opening),
            ("multiprocessing.process", "BaseProcess", "start", self._starting),
        ):
            # A program that runs a framework has imported both.
            if (owner := getattr(sys.modules.get(module), kind, None)) is None:
                continue
            original = vars(owner)[name]
            if original not in self._made:
                self._made[original] = functools.wraps(original)(wrap(original))
            self._replaced.append((owner, name, original, self._made[original]))
            setattr(owner, name, self._made[original])

    def end(self) -> None:
        """Restore what was replaced, unless somebody else has replaced it since."""
        while self._replaced:
            owner, name, original, replacement = self._replaced[-1]
            if vars(owner)[name] is replacement:
                setattr(owner, name, original)
            self._replaced.pop()

    def _opening(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(process: Any, args: Any, *others: Any, **options: Any) -> None:
            original(process, args, *others, **options)
            environment = options.get("env")
            is_told = VARIABLE in (os.environ if environment is None else environment)
            if not is_told and is_program(args):
                self._note()

        return call

    def _starting(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(process: Any) -> None:
            before = self._forks()
            original(process)
            if VARIABLE not in os.environ and self._forks() == before:
                self._note()

        return call


def is_program(command: Any) -> bool:
    """Return True for a command by which Python runs a program that no library brings.

    >>> is_program(["python3", "train.py"])
    True
    >>> is_program(["git", "status"])
    False
    """
    words = command.split() if isinstance(command, str) else command
    words = [words] if isinstance(words, (bytes, os.PathLike)) else list(words)
    words = [os.fsdecode(word) for word in words]
    if not words:
        return False
    if not (words[0] == sys.executable or _PYTHON.fullmatch(os.path.basename(words[0]))):
        return _runs_python(words[0])
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return not (script.startswith(_LIBRARIES) or _SITE in script)


def _runs_python(name: str) -> bool:
    """Return True for an installed script that Python runs, such as a launcher."""
    try:
        with open(shutil.which(name) or name, "rb") as file:
            first = file.readline(256)
    except OSError:
        return False
    return first.startswith(b"#!") and b"python" in first
