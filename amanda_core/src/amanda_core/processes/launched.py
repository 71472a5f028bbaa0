"""Which process of a run this is, as its launcher says in variables."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

from amanda_core.errors import ConfigError

__all__ = ["Process"]

#: How variables end that frameworks read, to be set by hand in each process.
_BY_HAND = "_PROCESS_ID", "_NUM_PROCESSES"
#: Launchers' variables: the number of a process among all, and how many there are. Those of
#: frameworks come first: a batch system may start one launcher of theirs on each machine.
_NUMBERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    # Of programs that start themselves again. On several machines it says nothing of the others.
    ("LOCAL_RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True, slots=True)
class Process:
    """One of the processes of a run.

    Attributes:
        rank: Its number; None if no launcher sets one.
        part: Name of its folder within the folder of results; empty if there is no rank.
        replaced: Number of processes whose results it keeps where it replaces earlier ones: see
            `Output.clear`.
        processes: How many processes the launcher started.
    """

    rank: int | None
    part: str
    replaced: int | None
    processes: int = 1

    @classmethod
    def of_environment(cls, several: bool = False) -> Process:
        """Return this process, as the launcher's variables describe it.

        Args:
            several: Whether it is known that it is one of several. A library that started the
                others may have removed the variable that says so.

        Raises:
            ConfigError: One of them is not a number.
        """
        rank, processes = _launched(several)
        restarts = [_number(name) or 0 for name in os.environ if name.endswith("_RESTART_COUNT")]
        if rank is None:
            return cls(None, "", 0)
        # Results of earlier runs are kept.
        part = f"rank{rank}-restart{max(restarts)}" if any(restarts) else f"rank{rank}"
        # The first process removes what forced runs leave over.
        return cls(rank, part, processes if part == "rank0" else None, processes)


def _launched(several: bool) -> tuple[int | None, int]:
    """Return the number of this process among those of its launcher, and how many there are.

    Raises:
        ConfigError: A variable is not what it should be.
    """
    rank, processes = _of_cluster()
    own, every = _BY_HAND
    prefixes = [name.removesuffix(own) for name in os.environ if name.endswith(own)]
    by_hand = [(one + own, one + every) for one in prefixes if one + every in os.environ]
    for number, size in (*by_hand, *_NUMBERS):
        # A batch system numbers a single process, too. `torchrun` always does.
        if number == "LOCAL_RANK" and _number("NODE_RANK"):
            continue
        if rank is None and (several or number == "RANK" or (_number(size) or 1) > 1):
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
