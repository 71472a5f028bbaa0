"""CUDA graphs and those of other devices: recorded once, and replayed without calling operators.

Owns when one is recorded and replayed, and under which tools; `recordings` owns what tools do in
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from amanda_core.driver_kit import Known, Session, Tool, replacing
from amanda_core.interface import CoverageGap, UnsupportedError
from amanda_driver_torch.threads.recordings import GRAPHS, Recording
from amanda_driver_torch.threads.state import STATE

__all__ = ["GAP", "end_all", "found", "kinds"]

GAP = CoverageGap(
    GRAPHS,
    "replays call no operators; a graph that is recorded under tools has their staged routines at "
    "operators that ran before",
)
#: Module of torch -> its class of graphs. Some came with later releases.
_KINDS = {"cuda": "CUDAGraph", "accelerator": "Graph", "xpu": "XPUGraph", "mtia": "MTIAGraph"}
#: Graph -> what it has of tools; None if it was recorded without.
_RECORDED: Known[Recording | None] = Known()


def kinds() -> list[Any]:
    """Return the classes of graphs that this release of torch has."""
    found = (getattr(getattr(torch, module, None), name, None) for module, name in _KINDS.items())
    return [kind for kind in found if kind is not None]


def found() -> Iterator[tuple[Any, str, Any]]:
    """Yield what to replace to watch recordings and replays: owner, name and replacement."""
    wrappers = {"capture_begin": _beginning, "capture_end": _ending, "replay": _replaying}
    for kind in kinds():
        for name, wrap in wrappers.items():
            yield kind, name, wrap(getattr(kind, name))


def end_all() -> None:
    """End the recordings of this thread that go on, since nobody watches their ends any more."""
    for recording in STATE.recordings:
        recording.end()


@replacing
def _beginning(original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
    attachment = STATE.attachment
    recording = None
    if attachment is not None and attachment.watching():
        recording = Recording(attachment.session)
    result = original(graph, *args, **kwargs)
    _RECORDED.set(graph, recording)  # It may have been recorded before, and reset.
    if recording is not None:
        recording.begin()
    return result


@replacing
def _ending(original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(graph, *args, **kwargs)
    finally:
        if (recording := _RECORDED.get(graph)) is not None:
            recording.end()


@replacing
def _replaying(original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
    recording, attachment = _RECORDED.get(graph), STATE.attachment
    if recording is not None:
        recording.prepare()
    if attachment is not None and attachment.watching():
        session = attachment.session
        tools = list(session.tools) if recording is None else recording.without(session)
        if tools:
            _tell_of(tools, session)
    return original(graph, *args, **kwargs)


def _tell_of(tools: list[Tool], session: Session) -> None:
    """Say that a replay does not have the present routines of these tools.

    Raises:
        UnsupportedError: One of these may edit.
    """
    why = "a replay has what was applied when the graph was recorded"
    if any(map(session.may_edit, tools)):
        raise UnsupportedError(
            f"Tools do not reach {GRAPHS}: {why}",
            where="amanda-driver-torch",
            fix="Record the graph inside `apply`, after its operators have run there, or call what "
            "it records",
        )
    session.warn_once(
        f"{GRAPHS} are not instrumented: {why}. Call what it records instead, or record it inside "
        "`apply`, after its operators have run there."
    )
    session.note_inside(GRAPHS, why)
