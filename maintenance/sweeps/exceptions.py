"""Differences in bits that are due to PyTorch and not to Amanda, each with its reason.

An exception covers only the facts that it names. A full run reports exceptions that nothing matches
any more as stale.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.metadata
from collections.abc import Iterable

from .observations import kind


@dataclasses.dataclass(frozen=True)
class Excepted:
    """An explained difference.

    Attributes:
        op: Pattern of the operator's name in torch's database.
        facts: Kinds of facts that may differ.
        reason: The reason, as printed in trust.md.
        routines: Routines under which they may differ.
        forms: Forms of the call in which they may differ; empty for all.
        prefix: Prefix of the names of these facts.
        releases: Pattern of the releases of torch in which they may differ.
    """

    op: str
    facts: frozenset[str]
    reason: str
    routines: frozenset[str] = frozenset({"none", "same", "clones"})
    forms: frozenset[str] = frozenset()
    prefix: str = ""
    releases: str = "*"

    @property
    def is_of_this_release(self) -> bool:
        """Whether it applies to the release of torch that is installed."""
        return fnmatch.fnmatch(importlib.metadata.version("torch"), self.releases)

    def covers(self, op: str, form: str, routine: str, names: Iterable[str]) -> bool:
        """Return True if this exception explains that these facts differ."""
        return (
            fnmatch.fnmatch(op, self.op)
            and self.is_of_this_release
            and routine in self.routines
            and (not self.forms or form in self.forms)
            and all(kind(name) in self.facts and name.startswith(self.prefix) for name in names)
        )


#: Found by many more plain runs.
UNSTABLE = "plain PyTorch does not repeat itself here: other plain runs differ from one another"
TRANSPOSED = (
    "V is a transposed view of a result that nobody else holds; behind the identity where the "
    "gradients of the three outputs meet it is a tensor of its own"
)
HANDED_BACK = (
    "`conj` hands a real tensor back, and the users of both add up their gradients in one place; "
    "copied, the result has a sum of its own, as after `y = y.clone()` in the program"
)
UNINITIALISED = "its result is memory that nobody has written"
ANOTHER_NODE = (
    "PyTorch 2.10 and 2.11 cannot make saved tensors from Python, so an edit adds a node, and "
    "gradients of gradients are summed in another order"
)

#: In the order in which they are tried.
EXCEPTED: tuple[Excepted, ...] = (
    *(
        Excepted(op, frozenset({"value"}), UNINITIALISED)
        for op in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty*")
    ),
    Excepted(
        "masked.std",
        frozenset({"value"}),
        HANDED_BACK,
        frozenset({"clones"}),
        prefix="second-order",
    ),
    Excepted(
        "*",
        frozenset({"value"}),
        ANOTHER_NODE,
        frozenset({"clones"}),
        prefix="second-order",
        releases="2.1[01].*",
    ),
    Excepted("svd", frozenset({"view"}), TRANSPOSED, frozenset({"none", "same"})),
)


def reason(op: str, form: str, routine: str, names: Iterable[str]) -> str:
    """Return why these facts may differ, or an empty string if nothing explains it.

    Args:
        op: Name of the operator.
        form: Form of the call.
        routine: The routine.
        names: The facts that differ.
    """
    names = list(names)
    for excepted in EXCEPTED:
        if excepted.covers(op, form, routine, names):
            return excepted.reason
    return ""
