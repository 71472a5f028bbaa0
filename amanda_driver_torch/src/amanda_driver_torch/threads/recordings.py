"""The part that tools have in a graph of a device, such as a `torch.cuda.CUDAGraph`.

Nothing is computed while it is recorded, and a replay calls no Python. So nothing is analysed then,
and only staged routines can be a part of the graph. Their edits are chosen on the device by one
truth value, the gate, so that the graph computes what it does without tools once these are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amanda_core.driver_kit import Memoized, Session, Step, Tool
from amanda_core.interface import UnsupportedError
from amanda_driver_torch.threads.state import STATE, call_quietly
from amanda_driver_torch.torch_internals.internals import runs_backward

__all__ = ["ACTIVE", "GRAPHS", "Recording", "current"]

#: Their name in notes and warnings.
GRAPHS = "CUDA graphs and those of other devices"
#: Those that go on, in any thread.
ACTIVE: list[Recording] = []


def current() -> Recording | None:
    """Return the recording that this thread adds operators to; None if there is none."""
    if STATE.recordings:
        found: Recording = STATE.recordings[-1]
        return found
    # A device's backward pass runs in a thread of the engine.
    if ACTIVE and runs_backward():
        others = torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()
        return None if others else ACTIVE[-1]
    return None


class Recording:
    """The part of a session's tools in one graph.

    Made before the recording begins, so that what it allocates does not belong to the graph.

    Args:
        session: The session.
    """

    def __init__(self, session: Session) -> None:
        #: None once it is closed: a graph may live on, and must not keep tools alive.
        self._session: Session | None = session
        self._control = session.control
        device = torch.accelerator.current_accelerator(check_available=True)
        self._gate = call_quietly(torch.ones, (), dtype=torch.bool, device=device or "cpu")
        self._stages, self._holds, self._edits = session.stages, False, False
        self._wait()
        self._caching = True
        session.at_close(self._close)

    def begin(self) -> None:
        """Let the operators of this thread be a part of it; programs of plans are not executed."""
        self._caching, self._holds = self._control.caching, True
        # From here on `end` undoes all of it, also if an exception arrives in between.
        STATE.recordings = [*STATE.recordings, self]
        ACTIVE.append(self)
        self._control.caching = False

    def end(self) -> None:
        """End what `begin` began, in the same thread."""
        if self in STATE.recordings:
            self._control.caching = self._caching
            ACTIVE[:] = [one for one in ACTIVE if one is not self]
            STATE.recordings = [one for one in STATE.recordings if one is not self]

    @property
    def holds(self) -> bool:
        """Whether all tools that the graph contains are applied as when it was recorded."""
        session = self._session
        return session is not None and all(stage in session.stages for stage in self._stages)

    def without(self, session: Session) -> list[Tool]:
        """Return the tools of a session whose present routines replays do not have."""
        known = self._stages if self.holds else ()
        pairs = zip(session.tools, session.stages, strict=True)
        return [tool for tool, stage in pairs if stage not in known]

    def prepare(self) -> None:
        """Let the next replay have the edits of the tools if these are applied and enabled."""
        self._hold(self.holds and self._control.enabled)

    def _close(self) -> None:
        self._hold(False)
        self._session = None

    def _hold(self, holds: bool) -> None:
        if self._edits and holds is not self._holds:
            self._holds = holds
            self._wait()
            call_quietly(self._gate.fill_, holds)
            self._wait()

    def changes(self, step: Step, values: Sequence[Any]) -> list[tuple[int, Any]]:
        """Run a staged step; return the positions that it changes, with values for both gates."""
        # What may be used again can be computed again, and has no other effects.
        if not (step.action.staged or isinstance(step.action.routine, Memoized)):
            self.leave_out(step)
            return []
        found = step(values)
        self._edits |= bool(found)
        return [(n, call_quietly(self._chosen, new, values[n])) for n, new in found]

    def leave_out(self, step: Step) -> None:
        """Leave a routine out of the graph, and let results say so.

        Raises:
            UnsupportedError: It may edit.
        """
        action, session = step.action, self._session
        if not action.observe and session is not None and session.may_edit(action.tool):
            raise UnsupportedError(
                "A routine on the host cannot edit what a graph of a device records",
                where=step.where,
                fix="Mark the routine with amanda.staged, or with observe=True if it only looks",
            )
        self.note("a replay calls no routines on the host")

    def note(self, why: str) -> None:
        """Warn, and let results say, that a part of the graph is not seen."""
        if self._session is not None:
            self._session.warn_once(f"{GRAPHS} are instrumented in part: {why}")
            self._session.note_inside(GRAPHS, why)

    def _wait(self) -> None:
        """Wait until the gate is written and read, since replays may run on any stream."""
        if self._gate.device.type != "cpu":
            torch.accelerator.synchronize(self._gate.device)

    def _chosen(self, new: Any, old: Any) -> Any:
        if isinstance(old, (list, tuple)):
            return type(old)(map(self._chosen, new, old))
        if not isinstance(new, torch.Tensor) or new.shape != old.shape:
            return new  # The driver says what is wrong with it.
        return torch.where(self._gate, new.to(old.dtype), old)
