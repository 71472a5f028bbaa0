"""`Record`: what an attachment knows of one op, forward or backward.

Owns the data only: which record an op has, `sites` and `places` say, what is done with it,
`execute` and `backward`.
"""

from __future__ import annotations

from typing import Any

from amanda_core import OpContext, Site
from amanda_core.identity import stable_id
from amanda_core.sites import Group
from amanda_driver_tf._eager.call_sites import CallSite
from amanda_driver_tf._eager.op_types import OpType
from amanda_driver_tf._shared.namespaces import EAGER

__all__ = ["Operands", "Record", "backward_site"]

#: The operands that tell ops apart, as (position, token).
Operands = tuple[tuple[int, int], ...]


class Record:
    """What an attachment knows of one op, forward or backward.

    Attributes:
        site: The facts that the core is told.
        op_type: Its type.
        forward: Record of the forward op of a backward op, if it has one.
        backward: Whether this is a backward op.
        idle: Epoch in which there is nothing to do when it executes; 0 for none.
        settled: Epoch in which there is nothing to do when its gradient is computed ...
        settled_again: ... and when that is itself differentiated.
        planned: Epoch in which something was to be done ...
        edited: ... and changed a value.
        reads: Records of the variable reads that its arguments imply.
        children: Its backward ops, by call site in the gradient function.
    """

    __slots__ = (
        "backward",
        "call_site",
        "children",
        "context",
        "edited",
        "forward",
        "group",
        "idle",
        "marks",
        "names",
        "next",
        "number",
        "occurrence",
        "op_type",
        "operands",
        "planned",
        "reads",
        "settled",
        "settled_again",
        "site",
        "skip",
        "swallows",
        "token",
        "waited",
        "watched",
    )

    def __init__(
        self,
        site: Site,
        op_type: OpType,
        *,
        forward: Record | None = None,
        backward: bool = False,
        watched: bool = True,
        marks: bool = False,
        swallows: bool = False,
    ) -> None:
        self.site, self.op_type = site, op_type
        self.forward, self.backward = forward, backward
        self.context: OpContext | None = None
        #: Tells it apart from all others, in every process.
        self.number: int = stable_id((forward.number if forward is not None else 0, site.key))
        self.idle = self.settled = self.settled_again = self.planned = self.edited = 0
        self.reads: tuple[Record, ...] = ()
        #: How often it was on a tape without its gradient having been computed.
        self.waited = 0
        #: For which inputs left out of account it was settled.
        self.skip: Any = None
        #: Of a read: the token of what is read.
        self.token = 0
        self.children: dict[Any, Record] = {}
        self.names: dict[str, int] = {}
        #: The op that followed it last in its activation; for a short cut only.
        self.next: Record | None = None
        self.group: Group[Record] | None = None
        self.call_site: CallSite | None = None
        self.operands: Operands = ()
        self.occurrence = 0
        #: False for what is none of the user's model, such as reading a data set.
        self.watched = watched
        #: Whether its output is that of a function with a gradient of its own.
        self.marks = marks
        #: Whether TensorFlow tries something else where it raises TypeError or ValueError.
        self.swallows = swallows


def backward_site(
    op_type: str, key: tuple[Any, ...], forward: Record | None, number: int, source: str | None
) -> Site:
    """The facts of a backward op; `number` tells apart those of one name."""
    base = f"{forward.site.name}:{op_type}" if forward is not None else op_type
    return Site(
        key=("backward", *key),
        op_type=op_type,
        namespace=EAGER,
        name=base if number == 1 else f"{base}#{number}",
        module_path=forward.site.module_path if forward is not None else "",
        source=forward.site.source if forward is not None else source,
        zone=forward.site.zone if forward is not None else "model",
    )
