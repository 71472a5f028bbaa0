"""Namespaces such as ``pytorch/2.13.0/eager``: parsing and prefix matching.

Owns the meaning of the three parts and how a pattern matches them. It does not know the names of
backends.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from amanda_core.errors import NamespaceError

__all__ = ["Namespace", "matches"]


class Namespace(NamedTuple):
    """Where an operator runs: framework, version and execution mode (paper, section 5.2).

    >>> Namespace.parse("pytorch/2.13.0/eager").version
    '2.13.0'
    """

    framework: str
    version: str
    mode: str

    @classmethod
    def parse(cls, text: str) -> Namespace:
        """Read ``framework/version/mode``.

        Raises:
            NamespaceError: The text does not have exactly three non-empty parts.
        """
        parts = text.split("/")
        if len(parts) != 3 or not all(parts):
            raise NamespaceError(f"{text!r} is not a namespace", fix="Write framework/version/mode")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.framework}/{self.version}/{self.mode}"


@lru_cache(maxsize=1024)
def matches(pattern: str, namespace: str) -> bool:
    """Return True if a rule for `pattern` applies in `namespace`.

    A pattern is a prefix at ``/`` boundaries. ``*`` matches any single part. The version may be
    given by a dotted prefix.

    >>> matches("tensorflow/2.21", "tensorflow/2.21.0/graph")
    True
    >>> matches("tensor", "tensorflow/2.21.0/graph"), matches("*/*/eager", "pytorch/2.13.0/eager")
    (False, True)

    Raises:
        NamespaceError: The pattern is empty, has an empty part or more than three.
    """
    wanted = pattern.strip("/").split("/")
    if len(wanted) > 3 or not all(wanted):
        raise NamespaceError(
            f"{pattern!r} is not a namespace pattern",
            fix="Write 'framework/version/mode' or the first parts of it; '*' is any part",
        )
    present = namespace.split("/")
    return len(wanted) <= len(present) and all(
        # Only the version is a dotted number, whose prefix means "any patch release".
        want in ("*", have) or (index == 1 and have.startswith(f"{want}."))
        for index, (want, have) in enumerate(zip(wanted, present, strict=False))
    )
