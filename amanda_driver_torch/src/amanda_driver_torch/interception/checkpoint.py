"""Activation checkpointing: reruns a function in a backward pass under the tools of its first run.

Owns what is remembered of a first run (tools, scopes, whether anything was edited), and the rerun.
A rerun under other tools would compute other activations than the forward pass, and so silently
wrong gradients.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from amanda_core.driver_kit import replacing
from amanda_core.interface import UnsupportedError
from amanda_driver_torch.identity.frames import BOUNDARY
from amanda_driver_torch.threads.state import STATE, call_quietly

__all__ = ["Rerun", "is_foreign_rerun", "watch_first_run"]


class Rerun:
    """A checkpointed function.

    Args:
        function: The user's function.
        first: Whether its first run is a call of this object, too.
    """

    def __init__(self, function: Callable[..., Any], first: bool) -> None:
        attachment = STATE.attachment
        self._function = function
        self._first = first
        self._attachment = attachment if attachment is not None and attachment.watching() else None
        self._activations = [activation.copy() for activation in STATE.activations]
        self._edits = self._before = 0
        if self._attachment is not None:
            session = self._attachment.session
            self._tools = [weakref.ref(tool) for tool in session.tools]
            self._call = session.call
            # Without the cache every analysis starts a new epoch, and the rerun is analysed again.
            self._epoch = session.epoch if session.caching else None
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function: the first time as it is, later under the tools of the first run."""
        if self._first:
            self._first = False
            self.begin()
            try:
                return self._function(*args, **kwargs)
            finally:
                self.end()
        attachment = self._attachment
        tools = [tool() for tool in self._tools] if attachment is not None else []
        if attachment is None or attachment.session.closed or None in tools:
            self._refuse_if_edited()
            return call_quietly(self._function, *args, **kwargs)
        session = attachment.session
        with session.as_of([tool for tool in tools if tool is not None], self._call):
            if self._epoch not in (None, session.epoch):
                self._refuse_if_edited()
            activations = [activation.copy() for activation in self._activations]
            return attachment.call_resumed(
                activations, functools.partial(self._function, *args, **kwargs)
            )

    def begin(self) -> None:
        """Note that the first run begins."""
        if self._attachment is not None:
            self._attachment.first_runs.append(self)
            self._before = self._attachment.edits

    def end(self) -> None:
        """Note that the first run has ended, and the number of its edits."""
        if self._attachment is not None:
            self._attachment.first_runs.remove(self)
            self._edits = self._attachment.edits - self._before

    def take_epoch(self) -> None:
        """Note that the tools were invalidated, which does not matter if nothing was edited yet."""
        attachment = self._attachment
        if attachment is not None and self._epoch and attachment.edits == self._before:
            self._epoch = attachment.session.epoch

    def _refuse_if_edited(self) -> None:
        if self._edits:
            raise UnsupportedError(
                "Tools edited a checkpointed function, which must be recomputed now, but these "
                "tools are no longer applied or were invalidated",
                where="torch.utils.checkpoint",
                fix="Call backward while the same tools are applied",
            )


BOUNDARY[id(Rerun.__call__.__code__)] = Rerun.__call__.__code__


@replacing
def watch_first_run(
    generator: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Iterator[Any]:
    """Run the generator of the variant in which the caller itself makes the first run."""
    rerun = Rerun(function, first=False)
    rerun.begin()
    try:
        yield from generator(rerun, *args, **kwargs)
    finally:
        rerun.end()


def is_foreign_rerun() -> bool:
    """Return True if the caller runs in a recomputation whose first run was not instrumented."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is Rerun.__call__.__code__:
            return False
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint" and code.co_name in (
            "recompute_fn",
            "backward",
        ):
            return True
        frame = frame.f_back
    return False
