"""The folder that a run writes its results to, and the process of the run that writes there.

Owns which folder is free without -o, and what launchers of several processes say in variables.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from amanda_core.errors import ConfigError, OutputError
from amanda_core.results.folder_lock import claim
from amanda_core.results.output import LOCK, Output

__all__ = ["DEFAULT", "Process", "ResultFolder"]

#: Default folder of results. A number is added if it is taken.
DEFAULT = "amanda_results"
#: Variables by which launchers tell their processes where to meet, so different for each launch.
_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
#: Name of a file that says which launcher's processes use a folder without -o.
_LAUNCHED = ".amanda-launched"


@dataclass(frozen=True, slots=True)
class Process:
    """One of the processes of a run.

    Attributes:
        rank: Its number; None if no launcher sets one.
        part: Name of its folder within the folder of results; empty if there is no rank.
        replaced: Number of processes whose results it keeps where it replaces earlier ones: see
            `Output.clear`.
    """

    rank: int | None
    part: str
    replaced: int | None

    @classmethod
    def of_environment(cls) -> Process:
        """Return this process, as the launcher's variables describe it.

        Raises:
            ConfigError: One of them is not a number.
        """
        rank, processes = _launched()
        restarts = [_number(name) or 0 for name in os.environ if name.endswith("_RESTART_COUNT")]
        if rank is None:
            return cls(None, "", 0)
        # Results of earlier runs are kept.
        part = f"rank{rank}-restart{max(restarts)}" if any(restarts) else f"rank{rank}"
        # The first process removes what forced runs leave over.
        return cls(rank, part, processes if part == "rank0" else None)


@dataclass(frozen=True, slots=True)
class ResultFolder:
    """The folder that a process is going to write to.

    Attributes:
        names: The names of the results.
        part: Name of the process's folder in it, or an empty string.
        force: Whether to replace earlier results.
    """

    names: Sequence[str]
    part: str
    force: bool

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
        output = self._output(folder)
        if not output.reserve():
            raise OutputError(
                f"{str(output.folder)!r} is the output folder of a run that has not ended",
                fix="Name another folder with -o. If there is no such run, as on file systems "
                f"without locks after it was killed, remove {LOCK} there",
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
        return not Output.taken(folder / self.part, self.names)

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


#: Launchers' variables: the number of a process among all, and how many there are. Those of
#: frameworks come first: a batch system may start one launcher of theirs on each machine.
_NUMBERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def _launched() -> tuple[int | None, int]:
    """Return the number of this process among those of its launcher, and how many there are.

    Raises:
        ConfigError: A variable is not what it should be.
    """
    rank, processes = _of_cluster()
    for number, size in _NUMBERS:
        # A batch system numbers a single process, too. `torchrun` always does.
        if rank is None and (number == "RANK" or (_number(size) or 1) > 1):
            rank, processes = _number(number), _number(size) or 1
    return rank, processes


def _of_cluster() -> tuple[int | None, int]:
    """Return the same from TensorFlow's description of a cluster of several processes."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return None, 1
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster", {}), config.get("task", {})
        before = {"chief": 0, "master": 0}
        leaders = sum(len(cluster.get(name, ())) for name in before)
        workers = len(cluster.get("worker", ()))
        number = int(task.get("index", 0)) + before.get(task.get("type"), leaders)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            "TF_CONFIG does not describe a cluster",
            where="TF_CONFIG",
            fix="Unset it if the program does not use one",
        ) from error
    if task.get("type") not in (*before, "worker") or leaders + workers < 2:
        return None, 1
    return number, leaders + workers


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ConfigError(
            f"{variable} is {text[:80]!r}, which is not a number",
            where=variable,
            fix="Unset it if no launcher of several processes sets it",
        )
    return int(text)
