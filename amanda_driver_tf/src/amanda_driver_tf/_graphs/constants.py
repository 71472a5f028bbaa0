"""Concrete values behind symbolic tensors: those of the variables that they read.

Owns the way from a tensor of a function through reads and captures to a variable's handle, and the
run that reads a variable of a session. Keeps no value beyond one analysis.
"""

from __future__ import annotations

from typing import Any

from amanda_driver_tf._shared.state import quietly
from amanda_driver_tf._tensorflow_internals.modules import errors, gen_resource_variable_ops, ops
from amanda_driver_tf._tensorflow_internals.objects import c_output, extend_graph, run_session

__all__ = ["Constants", "SessionConstants"]


class Constants:
    """Values of variables that a function reads.

    While `handles` is set, arguments of the function being called are known, too.
    """

    def __init__(self) -> None:
        #: Op of a placeholder (its id) -> the eager handle that is passed for it.
        self.handles: dict[int, Any] = {}

    def read(self, tensor: Any) -> Any:
        """Return the value of a tensor that is a variable's, or None."""
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


class SessionConstants:
    """Values of variables that a graph reads, each got by a run of its own."""

    def __init__(self) -> None:
        self._owner: Any = None

    def bind(self, owner: Any) -> None:
        """Read through `owner` from now on; None ends it."""
        self._owner = owner

    def read(self, tensor: Any) -> Any:
        """Return the value of a tensor that is a variable's, or None."""
        op = tensor.op
        while op.type == "Identity":
            op = op.inputs[0].op
        if self._owner is None or op.type not in ("ReadVariableOp", "VariableV2", "Variable"):
            return None
        if op.type == "ReadVariableOp" and op.inputs[0].op.type != "VarHandleOp":
            return None
        try:
            extend_graph(self._owner)
            return run_session(self._owner, [c_output(op.outputs[0])])[0]
        except errors.FailedPreconditionError:
            return None  # It has no value yet.
