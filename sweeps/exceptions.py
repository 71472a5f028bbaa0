"""Where bits may differ, and why that is PyTorch's and not Amanda's: each with its reason.

An exception covers the facts that it names and no others; one that nothing matches any more is
reported as stale by a full run.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable

from .observations import kind


@dataclasses.dataclass(frozen=True)
class Excepted:
    """An explained difference.

    Attributes:
        op: Pattern of the operator's name in torch's database.
        facts: The kinds of facts that may differ.
        reason: Why, as docs/trust.md prints it.
        routines: The routines under which it may.
        forms: The forms of the call in which it may; empty: in all.
        prefix: How the names of these facts begin.
    """

    op: str
    facts: frozenset[str]
    reason: str
    routines: frozenset[str] = frozenset({"none", "same", "clones"})
    forms: frozenset[str] = frozenset()
    prefix: str = ""

    def covers(self, op: str, form: str, routine: str, names: Iterable[str]) -> bool:
        """Whether it explains that these facts differ."""
        return (
            fnmatch.fnmatch(op, self.op)
            and routine in self.routines
            and (not self.forms or form in self.forms)
            and all(kind(name) in self.facts and name.startswith(self.prefix) for name in names)
        )


#: Found by running plain once more, many times.
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
    Excepted("svd", frozenset({"view"}), TRANSPOSED, frozenset({"none", "same"})),
)


def reason(op: str, form: str, routine: str, names: Iterable[str]) -> str:
    """Why these facts may differ; empty where nothing explains it.

    Args:
        op: The operator's name.
        form: The form of the call.
        routine: The routine.
        names: The facts that differ.
    """
    names = list(names)
    for excepted in EXCEPTED:
        if excepted.covers(op, form, routine, names):
            return excepted.reason
    return ""
