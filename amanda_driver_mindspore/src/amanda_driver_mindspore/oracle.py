"""MindSpore's own dispatcher as an oracle: no operator runs outside of those that tools see."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import THREAD
from amanda_core.interface import ConfigError, CoverageGap
from amanda_driver_mindspore.execution.eager import PyNativeProgram
from amanda_driver_mindspore.mindspore_internals.dispatch import HAS_MODES, DispatchMode, place
from amanda_driver_mindspore.vocabulary import is_quiet

__all__ = ["VARIABLE", "Oracle"]

#: The environment variable that asks for the oracle, unless it is empty or 0.
VARIABLE = "AMANDA_MINDSPORE_ORACLE"
_OUTSIDE = "outside of the functions that the driver replaces, in MindSpore's dispatcher"


class Oracle(DispatchMode):  # type: ignore[misc]
    """Notes the operators of a thread's forward program that tools do not see, if it is asked for.

    It is below autograd, so it cannot edit.

    Attributes:
        inside: How many operators ran inside of those that tools see.
        outside: Operator that they do not see -> how often it ran.

    Args:
        program: The program of the thread.

    Raises:
        ConfigError: It is asked for, and this release of MindSpore has no ``MsDispatchMode``.
    """

    def __init__(self, program: PyNativeProgram) -> None:
        self._program, self.inside = program, 0
        self._is_asked = os.environ.get(VARIABLE, "") not in ("", "0")
        if self._is_asked and not HAS_MODES:
            raise ConfigError(
                "This release of MindSpore has no MsDispatchMode, which the oracle needs",
                where=VARIABLE,
                fix=f"Leave out {VARIABLE}, or upgrade MindSpore",
            )
        self.outside: dict[str, int] = {}
        #: The thread in which it listens, and how many modes are entered there; None in none.
        self._place: tuple[int, int] | None = None

    def enter(self) -> None:
        """Begin to listen in the calling thread."""
        if self._is_asked:
            self.__enter__()
            self._place = place()

    def leave(self) -> None:
        """End it, if no other mode was entered since; else it ends at the next operator."""
        if self._place is not None and self._place == place():
            self._end()

    def _end(self) -> None:
        self._place = None
        self.__exit__(None, None, None)

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        session = self._program.session
        if session.closed:
            self._end()
        elif THREAD.control.routine_depth:
            self.inside += 1
        elif session.enabled and not self._program.backward and not is_quiet(func.name):
            self.outside[func.name] = self.outside.get(func.name, 0) + 1
            session.note_call(func.name, _OUTSIDE)
        return func(*args)

    def gaps(self) -> Sequence[CoverageGap]:
        """Return the operators that tools do not see, and what the oracle itself does not."""
        if not self._is_asked:
            return []
        found = self.outside.items()
        return [
            *(CoverageGap(f"{name} (called {n}x)", f"it ran {_OUTSIDE}") for name, n in found),
            CoverageGap(
                "indexing and backward operators, for the oracle",
                "MindSpore's dispatcher does not see indices that make views, and the backward "
                f"programs are in C++. It ran {self.inside} operators inside of those that tools "
                "see",
            ),
        ]
