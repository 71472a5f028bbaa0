"""Op identity in frameworks whose modules are known by their paths, and not as objects.

Such as functional frameworks, in which modules are made again at each call. The rule itself is in
`sites`. Drivers import this; the engine does not.
"""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

from amanda_core import sites
from amanda_core.execution import OpRecord
from amanda_core.path_modules import ModulePlace
from amanda_core.scopes import OUTSIDE, Labels, Scope, Scopes

__all__ = ["PathSites"]


class PathSites:
    """The ops of one mode that were seen so far. It resumes with the contexts.

    Args:
        rules: The driver's description of its framework.
        namespace: The namespace of the mode.
    """

    def __init__(self, rules: sites.Rules, namespace: str) -> None:
        self._scopes: dict[tuple[str, str], Scope] = {}
        self._counts: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()
        self._sites: sites.Sites[OpRecord] = sites.Sites(
            rules,
            None,
            Scopes(lambda module: {}, lambda module: ()),
            Labels(()),
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
                weakly. None if each call is the first one.
        """
        root, path, around = place
        counts = {} if part is None else self._counts.setdefault(part, {})
        scope = OUTSIDE
        if root or path:
            number = len(self._scopes) + 1
            scope = self._scopes.setdefault((root, path), Scope(number, root, path))
        levels: list[sites.Level] | None = None if around is None else []
        found = self._sites.walk(frame, sites.FRAMES if root else 1, levels)
        if levels is not None and around is not None:
            depth = _distance(frame, around)
            found = [one for one, level in zip(found, levels, strict=False) if level[0] <= depth]
        return self._sites.passed(sites.Origin(op_type, scope, found), (), counts)[0]


def _distance(frame: FrameType, outer: FrameType) -> int:
    """Return how many calls a frame is inside another one."""
    distance, current = 0, frame
    while current is not outer and current.f_back is not None:
        distance, current = distance + 1, current.f_back
    return distance
