"""Values of the variables that symbolic tensors read.

Owns the way from a function's tensor through reads and captures to a variable's handle, and the
session run that reads a variable. Values are not kept beyond one analysis.
"""

from __future__ import annotations

from typing import Any

from amanda_driver_tf.tensorflow_internals.modules import (
    dtypes,
    errors,
    gen_resource_variable_ops,
    ops,
)
from amanda_driver_tf.tensorflow_internals.objects import (
    c_output,
    extend_graph,
    is_symbolic,
    run_session,
)
from amanda_driver_tf.threads import quietly

__all__ = ["Constants", "SessionConstants"]


# Ops that take the handle of a variable and do not write it.
_READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
)


class Constants:
    """Reads the values of variables that a function uses.

    `handles` gives the arguments of the function that is being called. A variable that this call
    writes before the read has no known value.
    """

    def __init__(self) -> None:
        #: Id of a placeholder's op -> the eager handle passed for it.
        self.handles: dict[int, Any] = {}
        #: The ops that call the function that is being read, from the outermost one.
        self.calls: list[Any] = []

    def read(self, tensor: Any) -> Any:
        """Return the value of a tensor that reads a variable, else None."""
        op = tensor.op
        while op.type == "Identity":
            op = op.inputs[0].op
        if op.type != "ReadVariableOp":
            return None
        handle = self._handle(op.inputs[0])
        if handle is None or self._may_be_written(handle, op):
            return None
        with quietly(), ops.init_scope():
            return gen_resource_variable_ops.read_variable_op(handle, op.get_attr("dtype"))

    def _may_be_written(self, handle: Any, read: Any) -> bool:
        """Return True if a variable may be written before `read` runs, in the same call."""
        for reader in (read, *self.calls):
            seen: set[str] = set()
            queue = list(reader.control_inputs)
            while queue:
                op = queue.pop()
                if op.name not in seen:
                    seen.add(op.name)
                    queue += op.control_inputs
                    if op.type not in _READS and any(
                        one.dtype == dtypes.resource and self._handle(one) is handle
                        for one in op.inputs
                    ):
                        return True
        return False

    def variable(self, tensor: Any) -> Any:
        """Return the handle of the variable that a tensor reads or refers to, else None."""
        if not is_symbolic(tensor):
            return None
        read = _reader(tensor)
        return self._handle(read) if read.dtype == dtypes.resource else None

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
    """Reads the values of variables in a graph, each by a session run of its own."""

    def __init__(self) -> None:
        self._owner: Any = None
        self.calls: list[Any] = []

    def bind(self, owner: Any) -> None:
        """Read through the session `owner` from now on; None ends this."""
        self._owner = owner

    def variable(self, tensor: Any) -> Any:
        """Return the op that holds the variable that a tensor reads or refers to, else None."""
        if not is_symbolic(tensor):
            return None
        op = _reader(tensor).op
        return op if op.type in ("VarHandleOp", "VariableV2", "Variable") else None

    def read(self, tensor: Any) -> Any:
        """Return the value of a tensor that reads a variable, else None."""
        op = tensor.op
        # A read that waits for others, such as assignments, has no value yet, and its run would
        # execute them.
        while op.type == "Identity" and not op.control_inputs:
            op = op.inputs[0].op
        if self._owner is None or op.type not in ("ReadVariableOp", "VariableV2", "Variable"):
            return None
        if op.type == "ReadVariableOp" and op.inputs[0].op.type != "VarHandleOp":
            return None
        if op.control_inputs:
            return None
        try:
            extend_graph(self._owner)
            return run_session(self._owner, [c_output(op.outputs[0])])[0]
        except errors.FailedPreconditionError:
            return None  # The variable is not initialized yet.


def _reader(tensor: Any) -> Any:
    """Return the handle that a tensor was read from, or the tensor itself."""
    while tensor.op.type in ("Identity", "ReadVariableOp"):
        tensor = tensor.op.inputs[0]
    return tensor
