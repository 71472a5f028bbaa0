"""Concrete values behind symbolic tensors of functions: those of the variables that they read.

Owns the way from a tensor through reads and captures to a variable's handle. Keeps none of them
beyond one analysis.
"""

from __future__ import annotations

from typing import Any

from tensorflow.python.framework import ops
from tensorflow.python.ops import gen_resource_variable_ops

from amanda_driver_tf._state import quietly

__all__ = ["Constants"]


class Constants:
    """Values of variables that a function reads.

    While `handles` is set, arguments of the function being called are known, too.
    """

    def __init__(self) -> None:
        #: Op of a placeholder (its id) -> the eager handle that is passed for it.
        self.handles: dict[int, Any] = {}

    def read(self, tensor: Any) -> Any:
        """The value of a tensor that is a variable's, or None."""
        op = tensor.op
        while op.type == "Identity":
            op = op.inputs[0].op
        if op.type != "ReadVariableOp":
            return None
        handle = self._handle(op.inputs[0])
        if handle is None:
            return None
        with quietly(), ops.init_scope():
            return gen_resource_variable_ops.read_variable_op(handle, op.get_attr("dtype"))

    def _handle(self, tensor: Any) -> Any:
        while not isinstance(tensor, ops.EagerTensor):
            known = self.handles.get(id(tensor.op))
            if known is not None:
                return known
            for outer, inner in getattr(tensor.graph, "captures", ()):
                if inner is tensor:
                    tensor = outer
                    break
            else:
                return None
        return tensor
