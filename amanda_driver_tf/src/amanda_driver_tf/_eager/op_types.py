"""Facts that are the same in every call of one op type: its arguments, and what its result means.

Owns the op types that need special treatment.
"""

from __future__ import annotations

import functools

from amanda_driver_tf._tensorflow_internals.modules import dtypes, op_def_registry

__all__ = ["OPAQUE", "PASS", "PLAIN", "READ", "OpType", "op_type_of"]

#: READ: returns a variable's value. PASS: its result represents the same variable as its input.
#: OPAQUE: calls the user's Python, whose operators are not seen.
PLAIN, READ, PASS, OPAQUE = range(4)

_KINDS = {
    "ReadVariableOp": READ,
    "Identity": PASS,
    # A weight in another precision.
    "Cast": PASS,
    "EagerPyFunc": OPAQUE,
    "PyFunc": OPAQUE,
    "PyFuncStateless": OPAQUE,
}


class OpType:
    """One op type.

    Attributes:
        name: TensorFlow's name of it.
        count: Number of its inputs by position; they are the first arguments of a call.
        handles: Positions of resource handles.
        kind: PLAIN, READ, PASS or OPAQUE.
    """

    __slots__ = ("count", "handles", "kind", "name", "positions")

    def __init__(self, name: str, handles: tuple[bool, ...]) -> None:
        self.name = name
        self.count = len(handles)
        self.positions = tuple(range(self.count))
        self.handles = frozenset(index for index, handle in enumerate(handles) if handle)
        self.kind = _KINDS.get(name, PLAIN)


@functools.cache
def op_type_of(name: str) -> OpType:
    """Return the op type of a name."""
    op_def = op_def_registry.get(name)
    if op_def is None:
        return OpType(name, ())
    resource = dtypes.resource.as_datatype_enum
    return OpType(name, tuple(argument.type == resource for argument in op_def.input_arg))
