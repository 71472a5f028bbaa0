"""`Record`: what an attachment knows about one op, forward or backward.

Owns the data only. `sites` and `places` find the record of an op; `execute` and `backward` use it.
"""

from __future__ import annotations

from typing import Any

from amanda_core.driver_kit import Group, OpContext, stable_id
from amanda_core.interface import Site
from amanda_driver_tf.identity.call_sites import CallSite
from amanda_driver_tf.identity.namespaces import EAGER
from amanda_driver_tf.operators.op_types import OpType

__all__ = ["Operands", "Record", "backward_site"]

#: The operands that distinguish ops, as (position, token).
Operands = tuple[tuple[int, int], ...]


class Record:
    """The data of an attachment about one op, forward or backward.

    Attributes:
        site: The facts passed to the core.
        op_type: Its type.
        forward: Record of the forward op of a backward op, if it has one.
        backward: Whether this is a backward op.
        idle: Epoch in which the op has no actions; 0 for none.
        settled: Epoch in which its gradient has no actions.
        settled_again: Epoch in which its gradient has none even if it is itself differentiated.
        planned: Epoch in which it had actions.
        edited: Epoch in which these changed a value.
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
        #: Identifies the record in every process.
        self.number: int = stable_id((forward.number if forward is not None else 0, site.key))
        self.idle = self.settled = self.settled_again = self.planned = self.edited = 0
        self.reads: tuple[Record, ...] = ()
        #: How often it was recorded on a tape while its gradient was not known.
        self.waited = 0
        #: The inputs without requested gradients for which it was settled.
        self.skip: Any = None
        #: For a read, the token of the variable.
        self.token = 0
        self.children: dict[Any, Record] = {}
        self.names: dict[str, int] = {}
        #: The op that followed it last in its activation, as a prediction.
        self.next: Record | None = None
        self.group: Group[Record] | None = None
        self.call_site: CallSite | None = None
        self.operands: Operands = ()
        self.occurrence = 0
        #: False for ops that do not belong to the user's model, such as reading a data set.
        self.watched = watched
        #: Whether its output is that of a function with a custom gradient.
        self.marks = marks
        #: Whether TensorFlow catches a TypeError or ValueError of it and tries something else.
        self.swallows = swallows


def backward_site(
    op_type: str, key: tuple[Any, ...], forward: Record | None, number: int, source: str | None
) -> Site:
    """Return the facts of a backward op; `number` distinguishes those of one name."""
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
