"""What is kept of an operator, and of an op: of one operator at one place of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amanda_core import OpContext, Site
from amanda_driver_torch._operators import schemas_of

if TYPE_CHECKING:
    from amanda_driver_torch._backward import NodeRecord

__all__ = ["OpRecord", "Operator"]


class Operator:
    """What is the same in every call of one operator.

    Attributes:
        raw: What users get from `context.get_op()`.
        op_type: Its name.
        aliases: Whether a result may share memory with an input, or nothing is known of that.
    """

    __slots__ = ("aliases", "counts", "func", "op_type", "raw")

    def __init__(self, func: Any, raw: Any, op_type: str) -> None:
        self.func, self.raw, self.op_type = func, raw, op_type
        schemas = schemas_of(func)
        returns = [schema.returns for schema in schemas]
        #: Numbers of tensors that the op may return; empty where that is not known.
        self.counts = (
            {len(kinds) for kinds in returns}
            if all(str(value.type) == "Tensor" for kinds in returns for value in kinds)
            else set()
        )
        # Dropout returns its input in evaluation, and no schema says so.
        self.aliases = (
            not schemas
            or "dropout" in op_type
            or any(
                # One that is written is an in-place or `out=` result, which is no view.
                result.alias_info is not None and not result.alias_info.is_write
                for schema in schemas
                for result in schema.returns
            )
        )


class OpRecord:
    """What an attachment knows of one op."""

    __slots__ = (
        "caller",
        "context",
        "hooks",
        "idle_epoch",
        "idle_nodes",
        "nodes",
        "program",
        "site",
    )

    def __init__(self, site: Site, caller: str) -> None:
        self.site = site
        #: Module of the frame that calls the operator.
        self.caller = caller
        self.context: OpContext | None = None
        #: Epoch in which there is nothing to do for this op; 0 for none.
        self.idle_epoch = 0
        #: Number of backward nodes that it made then; another number is looked at again. -1 while
        #: some of them have not run, and so have not been analysed.
        self.idle_nodes = 0
        self.nodes: dict[Any, NodeRecord] = {}
        #: The plan in the form that the native interceptor runs, where it has one.
        self.program: object = None
        #: The plans of its nodes in that form.
        self.hooks: object = None
