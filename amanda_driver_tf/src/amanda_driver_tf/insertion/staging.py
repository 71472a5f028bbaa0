"""Staged routines: functions over tensors, traced into native operations.

Owns the tracing. Captured tensors such as masks become constants of the traced function, so that it
can be called from any graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.body import Value, is_ref
from amanda_driver_tf.insertion.nodes import Flat
from amanda_driver_tf.tensorflow_internals.modules import (
    atomic_function,
    context,
    dtypes,
    func_graph,
    ops,
)
from amanda_driver_tf.tensorflow_internals.objects import create_operation
from amanda_driver_tf.threads import quietly

__all__ = ["static_shape", "trace", "trace_gradient"]


def trace(name: str, flat: Flat, inputs: Sequence[Value]) -> Any:
    """Trace a function for tensors of the dtypes and shapes of `inputs`.

    Returns:
        An AtomicFunction without captures.

    Raises:
        UnsupportedError: The routine captured a resource such as a variable.
    """
    label = "amanda_routine_" + "".join(c if c.isalnum() else "_" for c in name)
    specs = [tf.TensorSpec(static_shape(value), _dtype(value)) for value in inputs]
    # init_scope: the routine is not part of a graph that is being built. A traced function keeps
    # its outer graph alive, so that is an empty one.
    with quietly(), ops.init_scope(), ops.Graph().as_default(), context.eager_mode():
        graph = func_graph.func_graph_from_py_func(
            label, lambda *tensors: flat(list(tensors)), specs, {}
        )
        for outer in graph.external_captures:
            if outer.dtype == dtypes.resource:
                raise UnsupportedError(
                    f"A staged routine at {name!r} reads a variable",
                    fix="Pass its value, or leave out @amanda.staged",
                )
        return atomic_function.from_func_graph(f"__{label}_{ops.uid()}", graph, {})


def trace_gradient(
    name: str, op: Any, ahead: Sequence[int], wanted: Sequence[int], values: Sequence[Value]
) -> Any:
    """Trace the gradient of an op: ``[*inputs, *gradients of outputs] -> gradients of inputs``.

    Args:
        name: The name of the node that will call it.
        op: The op.
        ahead: Outputs whose gradients are given.
        wanted: Inputs whose gradients are computed.
        values: Inputs and gradients, for their dtypes and shapes.
    """
    count = len(op.inputs)

    def flat(tensors: list[Any]) -> list[Any]:
        # A separate tensor for each position, even if the op reads one tensor twice.
        inputs = [tf.identity(tensor) for tensor in tensors[:count]]
        attributes = {key: value for key, value in op.node_def.attr.items() if key[0] != "_"}
        again = create_operation(
            ops.get_default_graph(),
            op.type,
            inputs,
            attrs=attributes,
            dtypes=[t.dtype for t in op.outputs],
        )
        found = tf.gradients(
            [again.outputs[index] for index in ahead],
            [inputs[index] for index in wanted],
            tensors[count:],
        )
        return [tf.convert_to_tensor(gradient) for gradient in found]

    return trace(name, flat, values)


def static_shape(value: Value) -> Any:
    """Return a value's shape as known when the graph was built; None for new nodes."""
    op = getattr(value.node, "op", None)
    if op is None or value.slot >= len(op.outputs):
        return None
    return op.outputs[value.slot].shape


def _dtype(value: Value) -> Any:
    dtype = value.dtype
    return dtypes.as_dtype(dtype - 100 if is_ref(dtype) else dtype)
