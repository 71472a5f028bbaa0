"""Op identity where modules are known by their paths, and not as objects.

Functional programs make their modules again at each call. The rule itself is in
`amanda_core.identity.sites`.
"""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

from amanda_core.driver_kit import (
    FRAMES,
    OUTSIDE,
    THREAD,
    Labels,
    Level,
    OpRecord,
    Origin,
    Rules,
    Scope,
    Scopes,
    Sites,
)
from amanda_driver_jax.identity.path_modules import ModulePlace

__all__ = ["PathSites"]


class PathSites:
    """The ops of one mode that were seen so far. It resumes with the contexts.

    Args:
        rules: The driver's description of its framework.
        namespace: The namespace of the mode.
    """

    def __init__(self, rules: Rules, namespace: str) -> None:
        self._scopes: dict[tuple[str, str, str], Scope] = {}
        #: The calls of models that run, outermost first, each with the occurrences in it.
        self._calls: list[tuple[FrameType, dict[Any, int]]] = []
        self._counts: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()
        #: Type and call site -> the op, where no module runs and occurrences are not counted.
        self._outside: dict[Any, OpRecord] = {}
        self._sites: Sites[OpRecord] = Sites(
            rules,
            None,
            Scopes(lambda module: {}, lambda module: ()),
            Labels(),
            {},
            namespace,
            make=lambda site, caller: OpRecord(site),
            drop=lambda record: None,
        )

    def locate(
        self,
        op_type: str,
        frame: FrameType,
        place: ModulePlace,
        part: Any = None,
    ) -> OpRecord:
        """Return the record of the op that is being called, and count this occurrence.

        Args:
            op_type: Its type.
            frame: The frame that calls it.
            place: Where the module that runs is.
            part: The part of the program that runs, in which occurrences are counted; it is held
                weakly. None if they are counted in the call of the model that runs.
        """
        root, path, around, call = place
        counts: dict[Any, int] = {}
        if part is not None:
            counts = self._counts.setdefault(part, counts)
        elif self._calls or call is not None:
            counts = self._counted(call)
        scope = OUTSIDE
        zone = THREAD.zones[-1].name if THREAD.zones else ""
        if root or path or zone:
            number = len(self._scopes) + 1
            scope = self._scopes.setdefault((root, path, zone), Scope(number, root, path, zone))
        levels: list[Level] | None = None if around is None else []
        found = self._sites.walk(frame, FRAMES if root else 1, levels)
        if levels is not None and around is not None:
            depth = _distance(frame, around)
            found = [one for one, level in zip(found, levels, strict=False) if level[0] <= depth]
        key = (op_type, *found) if scope is OUTSIDE else None
        record = self._outside.get(key)
        if record is None:
            record, _, _ = self._sites.passed(Origin(op_type, scope, found), (), counts)
            if key is not None:
                self._outside[key] = record
        return record

    def leave_calls(self) -> None:
        """Let go of the calls of models: their frames hold what these computed."""
        self._calls.clear()

    def _counted(self, call: FrameType | None) -> dict[Any, int]:
        """Return the occurrences in a call of a model that is running.

        A frame cannot be held weakly. So the last ones are held until another operator is called.
        """
        calls = self._calls
        while calls and calls[-1][0] is not call and not _is_around(calls[-1][0], call):
            calls.pop()
        if call is None:
            return {}
        if not calls or calls[-1][0] is not call:
            calls.append((call, {}))
        return calls[-1][1]


def _is_around(outer: FrameType, frame: FrameType | None) -> bool:
    """Return True if a frame is called inside another one, which is still running."""
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


def _distance(frame: FrameType, outer: FrameType) -> int:
    """Return how many calls a frame is inside another one."""
    distance, current = 0, frame
    while current is not outer and current.f_back is not None:
        distance, current = distance + 1, current.f_back
    return distance
