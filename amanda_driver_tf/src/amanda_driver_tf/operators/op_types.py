"""Facts that are the same in every call of one op type: its arguments, and what its result means.

Owns the op types that need special treatment.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from amanda_driver_tf.tensorflow_internals.modules import dtypes, op_def_registry, ops

__all__ = ["OPAQUE", "PASS", "PLAIN", "READ", "OpType", "op_type_of"]

#: READ: returns a variable's value. PASS: its result represents the same variable as its input.
#: OPAQUE: calls the user's Python, whose operators are not seen.
PLAIN, READ, PASS, OPAQUE = range(4)

_EagerTensor = ops.EagerTensor

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

    __slots__ = ("_dtypes", "count", "handles", "kind", "name", "positions")

    def __init__(self, name: str, inputs: Sequence[Any] = ()) -> None:
        self.name = name
        self.count = len(inputs)
        self.positions = tuple(range(self.count))
        resource = dtypes.resource.as_datatype_enum
        self.handles = frozenset(i for i in self.positions if inputs[i].type == resource)
        self.kind = _KINDS.get(name, PLAIN)
        #: For each input the dtype, or the name of the attribute that all its tensors agree in.
        self._dtypes: list[Any] = [
            None if one.number_attr or one.type_list_attr else one.type_attr or one.type
            for one in inputs
        ]

    def disagree(self, args: Sequence[Any]) -> bool:
        """Return True if no kernel can take the dtypes of the tensors among the arguments."""
        found: dict[str, int] = {}
        for expected, value in zip(self._dtypes, args, strict=False):
            if expected is None or type(value) is not _EagerTensor:
                continue
            dtype = value.dtype.as_datatype_enum
            if dtype != (expected if type(expected) is int else found.setdefault(expected, dtype)):
                return True
        return False


@functools.cache
def op_type_of(name: str) -> OpType:
    """Return the op type of a name."""
    op_def = op_def_registry.get(name)
    return OpType(name) if op_def is None else OpType(name, op_def.input_arg)
