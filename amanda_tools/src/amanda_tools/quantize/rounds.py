"""Runs of a program, in each of which an operator may run several times."""

from __future__ import annotations

from amanda_core import Tool
from amanda_core.engine.calls import Call

__all__ = ["Rounds"]


class Rounds:
    """Counts runs: calls of outermost modules, and steps.

    An operator in a loop, such as that of a recurrent network, runs several times in one of them.
    Outside of modules each execution of an operator is a run, unless a graph executes it.

    Args:
        tool: The tool that wants to know.
    """

    def __init__(self, tool: Tool) -> None:
        self._number, self._running = 0, False
        tool.add_inst_for_call(self._begin, self._end)
        tool.add_inst_for_step(end=self._next)

    def present(self, alone: bool) -> int:
        """Return the number of the run in which an operator is executed now.

        Args:
            alone: Whether its routine runs where the program calls the operator.
        """
        if alone and not self._running:
            self._number += 1
        return self._number

    def _begin(self, call: Call) -> None:
        self._running = True

    def _end(self, call: Call) -> None:
        self._running = False
        self._number += 1

    def _next(self, step: int) -> None:
        self._number += 1
