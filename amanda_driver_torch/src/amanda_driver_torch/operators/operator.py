"""Facts that are the same in every call of one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from amanda_driver_torch.operators.bindings import is_operator, operator_of, schemas_of, type_name

__all__ = ["Args", "Kwargs", "Operator", "Original"]

#: What a call is made of: the function that it runs without tools, and its arguments.
Original: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


class Operator:
    """Facts that are the same in every call of one operator.

    Attributes:
        raw: The object that `context.get_op()` returns.
        op_type: Its name.
        views: Whether a schema says that a result may share memory with an input.
        aliases: Whether a result may share memory with an input, as far as is known.
        empty_with_out: Whether it returns nothing if it is given `out=`; others return that.
    """

    __slots__ = ("aliases", "counts", "empty_with_out", "func", "op_type", "raw", "views")

    def __init__(self, func: Any, raw: Any, op_type: str) -> None:
        self.func, self.raw, self.op_type = func, raw, op_type
        schemas = schemas_of(func)
        returns = [schema.returns for schema in schemas]
        #: The possible numbers of returned tensors; empty if not known.
        self.counts = (
            {len(kinds) for kinds in returns}
            # `nonzero(as_tuple=True)` returns one for each dimension, and no schema says so.
            if op_type != "nonzero"
            and all(str(value.type) == "Tensor" for kinds in returns for value in kinds)
            else set()
        )
        self.empty_with_out = any(
            not schema.returns and any(argument.is_out for argument in schema.arguments)
            for schema in schemas
        )
        self.views = any(
            # A written result is that of an in-place or `out=` op, and not a view.
            result.alias_info is not None and not result.alias_info.is_write
            for schema in schemas
            for result in schema.returns
        )
        # Dropout returns its input in evaluation mode, which its schema does not tell.
        self.aliases = not schemas or "dropout" in op_type or self.views

    @classmethod
    def of(cls, func: Any) -> Operator | None:
        """Return the operator that a function reported by torch's protocol is; None if it is
        none.
        """
        return cls(func, operator_of(func), type_name(func)) if is_operator(func) else None
