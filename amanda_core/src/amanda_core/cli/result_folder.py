"""The folder that a run writes its results to.

Owns which folder is free without -o.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from amanda_core.errors import OutputError
from amanda_core.results.folder_lock import claim, is_locked
from amanda_core.results.output import LOCK, Output, processes_in

__all__ = ["DEFAULT", "ResultFolder"]

#: Default folder of results. A number is added if it is taken.
DEFAULT = "amanda_results"
#: Variables by which launchers tell their processes where to meet, so different for each launch.
_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
#: Name of a file that says which launcher's processes use a folder without -o.
_LAUNCHED = ".amanda-launched"


@dataclass(frozen=True, slots=True)
class ResultFolder:
    """The folder that a process is going to write to.

    Attributes:
        names: The names of the results.
        part: Name of the process's folder in it, or an empty string.
        force: Whether to replace earlier results.
        children: Whether processes that this one starts will write there, too.
    """

    names: Sequence[str]
    part: str
    force: bool
    children: bool = False

    def reserve(self, folder: Path | None, is_shared: bool = False) -> Output:
        """Reserve the folder, or the first free one of the default name.

        Args:
            folder: The folder; None for the default.
            is_shared: Whether `folder` is named for all runs. Each of them gets one of its own.

        Raises:
            OutputError: It has such results, is used by another run, or cannot be written.
        """
        if folder is None:
            return self._first_free(Path.cwd() / DEFAULT, self._is_free)
        if is_shared:
            return self._first_free(folder, self._has_none)
        if not self.force and (taken := self._taken_by_children(folder)):
            raise OutputError(
                f"{str(folder)!r} has results already: {', '.join(taken)}",
                fix="Name another folder with -o, or replace them with --force",
            )
        used = folder.resolve() / self.part
        output = None if is_locked(used / LOCK) else self._output(folder)
        if output is None or not output.reserve():
            raise OutputError(
                f"{str(used)!r} is the output folder of a run that has not ended",
                fix="Name another folder with -o; set RANK and WORLD_SIZE in each process if these "
                "are processes of one run. If a run was killed on a file system without locks, "
                f"remove {LOCK} there",
            )
        return output

    def _output(self, folder: Path) -> Output:
        return Output(folder, self.names, part=self.part, force=self.force)

    def _first_free(self, folder: Path, is_free: Callable[[Path], bool]) -> Output:
        number, chosen = 1, folder
        while True:
            if (self.force or is_free(chosen)) and self._is_ours(chosen):
                output = self._output(chosen)
                if output.reserve():
                    return output
            number += 1
            chosen = folder.with_name(f"{folder.name}-{number}")

    def _has_none(self, folder: Path) -> bool:
        """Return True if a folder has no results of these tools, whatever else is there."""
        return not (Output.taken(folder / self.part, self.names) or self._taken_by_children(folder))

    def _taken_by_children(self, folder: Path) -> list[str]:
        """Return the processes whose results are there, and would be mixed with new ones."""
        if self.part or not self.children or not folder.is_dir():
            return []
        return [one.name for one in processes_in(folder) if Output.taken(one, self.names)]

    def _is_free(self, folder: Path) -> bool:
        """Return True if nothing of an earlier run is in a folder."""
        if self.part:  # All ranks of a run choose one folder, where some may have written already.
            return self._has_none(folder)
        return not folder.is_dir() or not any(folder.iterdir())

    def _is_ours(self, folder: Path) -> bool:
        """Return False if the processes of another launcher, which may run now, use the folder."""
        launcher = " ".join(filter(None, map(os.environ.get, _LAUNCHER)))
        if not self.part or not launcher:
            return True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return claim(folder / _LAUNCHED, launcher)
        except OSError as error:
            raise OutputError(
                f"{str(folder)!r} cannot be written: {error.strerror}", fix="Name another with -o"
            ) from error
