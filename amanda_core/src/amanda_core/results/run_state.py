"""`RunState`: how far a process of a run came, in a file beside its results.

The file is there while the process runs. It stays if the process did not end well, or is one of
several, so that readers can say what is missing.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from amanda_core.results.folder_lock import is_locked
from amanda_core.runtime import bounded

__all__ = ["LOCK", "STATE", "RunState"]

#: Name of the lock file. It is in the folder only while a run writes there.
LOCK = ".amanda-run"
#: Name of the file of a process's state.
STATE = ".amanda-process"
_LIMIT = 1 << 16


@dataclass
class RunState:
    """How far a process came.

    Attributes:
        program: What it runs.
        pid: Number of the process.
        run: Identifies the run, which may have several processes.
        rank: Its number among those of a launcher, or None.
        processes: How many processes the launcher started.
        ended: Whether it wrote its results at its end.
        problem: How it ended, if not well.
        saved: When its results were last written, in seconds since 1970; None if never.
        waits: What it was doing when somebody last interrupted it in vain, or an empty text.
        records: Name of a result -> the folder in which its tool records, relative to that of the
            results.
    """

    program: str
    pid: int
    run: str = ""
    rank: int | None = None
    processes: int = 1
    ended: bool = False
    problem: str = ""
    saved: float | None = None
    waits: str = ""
    records: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, folder: Path) -> RunState | None:
        """Return the state of the process that writes to a folder; None if nothing says it."""
        try:
            content: Any = json.loads(bounded.read(folder / STATE, _LIMIT))
            names = [one.name for one in fields(cls)]
            return cls(**{name: content[name] for name in names if name in content})
        except (bounded.Unreadable, ValueError, TypeError, RecursionError):
            return None

    def sentence(self, folder: Path) -> str:
        """Return what a reader of the results must know, or an empty text if all is well.

        Args:
            folder: The folder of the results.
        """
        until = "nothing was written until then"
        if self.saved is not None:
            with suppress(OverflowError, OSError, ValueError):
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.saved))
                until = f"its results are those of {at}"
        if self.ended:
            text = self.problem
        elif is_locked(folder / LOCK):
            text = f"has not ended yet; {until}"
        else:
            text = f"did not end: it was killed or has crashed; {until}"
        if text and self.waits:
            text += f". It was {self.waits}"
        return text and f"{self.program} (process {self.pid}) {text}"
