"""Exceptions that arrive at any line, such as Ctrl-C: they leave nothing behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from amanda_core.driver_kit.patching import Patches
from amanda_core.engine.activation import apply
from amanda_core.engine.tool import Tool
from amanda_core.runtime.threads import THREAD
from amanda_core.testing.kit.capabilities import Needs, needs, reason_to_skip
from amanda_core.testing.kit.interruption import count_lines, distinct_lines, interrupt
from amanda_core.testing.kit.rig import Built, Rig

#: How many lines the fast test tries with each exception.
SAMPLE = 2
#: How many parts the exhaustive tests have: the lines of files, where each runs first, and then as
#: many of all lines.
PARTS = 16


class _Uses:
    """One program under tools, and what it leaves behind."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.built = rig, rig.build("chain")
        self.backward = not reason_to_skip(Needs(("gradients",)), rig.backend, rig.info)
        self._seen: list[tuple[str, int]] = []
        self._later = self.tool(self._seen)
        self.run(self._later)  # What is made once is not looked for.
        self.found = dict(rig.backend.found())
        # By type, since objects of frameworks may do anything when asked for their class.
        self.patches = [one for one in gc.get_objects() if issubclass(type(one), Patches)]
        self.used = self.installed()
        self.expected = self.look()

    def run(self, tool: Tool) -> None:
        with apply(tool):
            _run(self.built, self.backward)

    def tool(self, seen: list[tuple[str, int]]) -> Tool:
        return self.rig.recording(seen, "mul", "add", "relu")

    def look(self) -> list[str]:
        """Return what a tool sees that is applied later."""
        self._seen.clear()
        self.run(self._later)
        return [common_type for common_type, _ in self._seen]

    def installed(self) -> list[Patches]:
        """Return the replacements of functions of the framework that are installed now."""
        return [patches for patches in self.patches if patches._users or patches._undo]

    def check(self, place: str) -> None:
        assert self.look() == self.expected, place
        after = self.rig.backend.found()
        assert [n for n in self.found if after.get(n) is not self.found[n]] == [], place
        assert self.installed() == self.used, place
        assert THREAD.session is None, place
        assert THREAD.control.enabled, place
        assert self.rig.is_run(self.built.run(), self.built), place


def _run(built: Built, backward: bool) -> None:
    if backward:
        built.gradients()
    else:
        built.run()


def _files_of(rig: Rig) -> tuple[str, ...]:
    """Return parts of the names of the framework's own files."""
    modules = filter(None, map(sys.modules.get, rig.info.modules))
    files = [Path(str(module.__file__)) for module in modules]
    return tuple(str(file.parent if file.name == "__init__.py" else file) for file in files)


def check(rig: Rig, part: int, every: int = PARTS) -> None:
    """Interrupt a program under tools, and check after each time that everything is as before.

    Args:
        rig: The rig.
        part: 0 for where each line of a file runs first, with each exception; 1 to `every` for one
            of as many parts of all lines that run, which share nothing.
        every: Into how many parts all lines are divided, since all of them take hours. With more
            than `PARTS`, the parts from 1 to `PARTS` are a sample.
    """

    def places(program: Callable[[], object], leaving_out: Sequence[str], turn: int) -> list[int]:
        if part:
            return list(range(part, count_lines(program, leaving_out) + 1, every))
        return distinct_lines(program, leaving_out)

    _check(rig, places)


def check_first_lines(rig: Rig, part: int, parts: int) -> None:
    """Interrupt a program where each line of a file runs first, as part 0 of `check`, in parts.

    Args:
        rig: The rig.
        part: Which part, from 0.
        parts: Into how many parts the lines are divided.
    """

    def places(program: Callable[[], object], leaving_out: Sequence[str], turn: int) -> list[int]:
        # Every other round leaves out the framework's lines, and its lines are in the one before.
        return [] if turn % 2 else distinct_lines(program, leaving_out)[part::parts]

    _check(rig, places)


def _check(
    rig: Rig, places: Callable[[Callable[[], object], Sequence[str], int], list[int]]
) -> None:
    """Interrupt a program at those of its lines that `places` chooses."""
    uses, given = _Uses(rig), rig.backend.not_interrupted
    for part, why in given.items():
        print(f"{rig.backend.title}: no exception in {part}: {why}")
    warm = uses.tool([])
    uses.run(warm)
    makes: list[Callable[[], Tool]] = [lambda: warm, lambda: uses.tool([])]
    files = tuple(given), (*given, *_files_of(rig))
    rounds = product(makes, (TimeoutError, KeyboardInterrupt), files)
    for turn, (make, kind, leaving_out) in enumerate(rounds):
        for at in places(lambda make=make: uses.run(make()), leaving_out, turn):  # type: ignore[misc]
            tool = make()
            program = partial(uses.run, tool)
            uses.check(interrupt(program, at, kind, leaving_out, may_be_handled=True))


@needs(interrupts=True)
def test_an_exception_at_a_sample_of_all_lines(rig: Rig) -> None:
    """Undo what is half done, whichever line an exception interrupts.

    Register `Session.at_close` before you change anything, put on record what is undone before it
    is done, and let undoing be repeated. `Patches` does so. A context manager in Python may be
    interrupted before it restores anything: use `try` with `except BaseException` in the function
    that changes the state, or set it, not counted, when the next session begins or ends.
    """

    def places(program: Callable[[], object], leaving_out: Sequence[str], turn: int) -> list[int]:
        lines = count_lines(program, leaving_out)
        step = max(1, lines // SAMPLE)
        return list(range(1 + step * turn // 8, lines + 1, step))

    _check(rig, places)
