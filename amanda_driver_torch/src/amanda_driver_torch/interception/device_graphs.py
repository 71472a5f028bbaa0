"""CUDA graphs and those of other devices: recorded once, and replayed without calling operators.

While one is recorded nothing is computed, so there are no values that routines could get, and what
they would run would be replayed after `apply` has ended. Tools do not see it, and are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from amanda_core.driver_kit import replacing
from amanda_core.interface import CoverageGap
from amanda_driver_torch.threads.state import STATE

__all__ = ["GAP", "end_all", "found", "kinds"]

GAP = CoverageGap(
    "CUDA graphs and those of other devices",
    "no values exist while one is recorded, and its replays call no operators",
)
#: Module of torch -> its class of graphs. Some came with later releases.
_KINDS = {"cuda": "CUDAGraph", "accelerator": "Graph", "xpu": "XPUGraph", "mtia": "MTIAGraph"}


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
    """Forget the recordings that go on, since nobody watches their ends any more."""
    # The end of the tools may have reset `quiet` before.
    STATE.quiet = max(0, STATE.quiet - STATE.recordings)
    STATE.recordings = 0


@replacing
def _beginning(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    _tell()
    STATE.recordings += 1
    STATE.quiet += 1
    return result


@replacing
def _ending(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    finally:
        if STATE.recordings:
            STATE.recordings -= 1
            STATE.quiet -= 1


@replacing
def _replaying(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _tell()
    return original(*args, **kwargs)


def _tell() -> None:
    attachment = STATE.attachment
    if attachment is not None and attachment.watching():
        attachment.session.warn_once(
            f"{GAP.what} are not instrumented: {GAP.why}. While tools are applied, call what a "
            "graph records instead of replaying it."
        )
        attachment.session.note_inside(GAP.what, GAP.why)
