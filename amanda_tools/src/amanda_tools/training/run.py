"""`TrainingRun`: tools that are applied while a library trains a model.

Owns when tools are applied and removed, and when results are shown and logged. It knows no library.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from amanda_core.engine.activation import Handle, attach
from amanda_core.engine.tool import Tool
from amanda_core.results import Result
from amanda_tools.kit.output.named_tools import named_tools, results_of
from amanda_tools.kit.output.scalars import ScalarLog, scalars_of

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ClosingCallback", "TrainingRun"]

#: Rows of a table that is shown when a training ends.
_ROWS = 15


class TrainingRun:
    """Applies tools from the beginning of a training to its end.

    Args:
        tools: Tools, or their names as on the command line.
        scalars: Where scalars of the results are logged; see `ScalarLog`. None for nowhere.
        every: Log them after every so many steps; None for the end of each epoch.
        show: Whether to print the results when a training ends.

    Attributes:
        tools: The tools by name.
        results: Their results, by name, once a training has ended.
    """

    def __init__(
        self,
        tools: Sequence[Tool | str],
        scalars: str | None = None,
        every: int | None = None,
        show: bool = True,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, but is {every}")
        self.tools = named_tools(tools, "amanda.callback")
        self.results: dict[str, Result] = {}
        self._target, self._every, self._show = scalars, every, show
        self._handle: Handle | None = None
        self._log: ScalarLog | None = None
        #: The trainer's global step, and that of the scalars that were logged last.
        self._step = self._logged = 0

    def begin(self, step: int = 0) -> None:
        """Apply the tools; a training that an exception left is ended first.

        Args:
            step: The trainer's global step, which is not 0 if a training is continued.
        """
        self.close()
        self._step = self._logged = step
        if self._target is not None:
            self._log = ScalarLog(self._target)
        self._handle = attach(*self.tools.values())

    def end_step(self, step: int) -> None:
        """Log scalars if enough steps have ended.

        Args:
            step: The trainer's global step: how many steps of the optimizer have ended.
        """
        before, self._step = self._step, step
        if self._every is not None and before // self._every < step // self._every:
            self._write()

    def end_epoch(self) -> None:
        """Log scalars, unless they are logged by steps."""
        if self._every is None:
            self._write()

    def close(self) -> None:
        """Remove the tools, and keep, log and show their results; does nothing the second time."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.remove()
        finally:
            self.results = results_of(self.tools)
            log, self._log = self._log, None
            if log is not None:
                if self._logged != self._step:
                    self._log_to(log)
                log.close()
            if self._show:
                for name, result in self.results.items():
                    print(f"{name}:\n{result.table().first(_ROWS)}\n")

    def _write(self) -> None:
        if self._log is not None:
            self.results = results_of(self.tools)
            self._log_to(self._log)

    def _log_to(self, log: ScalarLog) -> None:
        self._logged = self._step
        for name, result in self.results.items():
            found = scalars_of(result)
            log.log({f"{name}/{key}": value for key, value in found.items()}, self._step)


class ClosingCallback:
    """The base of callbacks: writes the results of a training run, even after an exception."""

    run: TrainingRun

    @property
    def results(self) -> dict[str, Result]:
        """Return the results by the name of their tool."""
        return self.run.results

    def close(self) -> None:
        """Remove the tools if they are still applied."""
        self.run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
