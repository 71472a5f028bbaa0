"""Private attributes of TensorFlow's graphs, operations, tensors, functions and sessions."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from amanda_driver_tf.tensorflow_internals.modules import (
    context,
    dtypes,
    ops,
    resource_variable_ops,
    script_ops,
    tensor,
    tensor_shape,
)

__all__ = [
    "AS_GRAPH_DEF",
    "NAME_STACK",
    "OPERATION_BY_NAME",
    "RELEASE",
    "SCOPE_MAPS",
    "add_control_inputs",
    "as_graph_def",
    "c_operation",
    "c_output",
    "collections_of",
    "control_flow_context",
    "create_operation",
    "dtype_of_handle",
    "extend_graph",
    "forget_gradients",
    "function_in",
    "functions_of",
    "graph_of_concrete",
    "graph_of_function",
    "handle_in_layer",
    "host_function",
    "host_functions",
    "indirect_captures",
    "is_reference",
    "keep_from_keras",
    "keep_mask",
    "lock_of",
    "names_in_use",
    "needs_reader",
    "operation_by_name",
    "operation_number",
    "operation_of",
    "output_types",
    "put_host_function",
    "reopen",
    "run_session",
    "set_control_flow_context",
    "set_message",
    "tensor_of_source",
    "variable_handle",
]

#: The installed release, without the suffix of its build.
RELEASE = str(tf.__version__).partition("+")[0]

# Graphs.

#: Methods of `tf.Graph` that return its operations.
OPERATION_BY_NAME, AS_GRAPH_DEF = "_get_operation_by_name", "_as_graph_def"
#: The effects of a graph's open scopes on new operations.
SCOPE_MAPS = ("_attr_scope_map", "_op_to_kernel_label_map", "_gradient_override_map")
NAME_STACK = "_name_stack"


def lock_of(graph: Any) -> Any:
    """Return the lock that guards a graph."""
    return graph._lock


def names_in_use(graph: Any) -> dict[str, int]:
    """Return the names taken in a graph, from which it makes unique names."""
    names: dict[str, int] = graph._names_in_use
    return names


def collections_of(graph: Any) -> dict[str, list[Any]]:
    """Return the collections of a graph, by name."""
    collections: dict[str, list[Any]] = graph._collections
    return collections


def functions_of(graph: Any) -> dict[str, Any]:
    """Return the functions in the library of a graph, by name; empty if it has no library."""
    functions: dict[str, Any] = getattr(graph, "_functions", {})
    return functions


def function_in(graph: Any, name: str) -> Any:
    """Return a function of a graph's library; None if it has none of this name."""
    return graph._get_function(name)


def reopen(graph: Any) -> None:
    """Let a finalized graph accept operations."""
    graph._unsafe_unfinalize()


def operation_by_name(graph: Any, name: str) -> Any:
    """Return an operation of a graph, or of the `super()` of one."""
    return getattr(graph, OPERATION_BY_NAME)(name)


def as_graph_def(graph: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Return the definition of a graph, or of the `super()` of one, and its version."""
    found: tuple[Any, int] = getattr(graph, AS_GRAPH_DEF)(*args, **kwargs)
    return found


def operation_of(graph: Any, c_op: Any) -> Any:
    """Return the operation for one of the C API."""
    return graph._get_operation_by_tf_operation(c_op)


def create_operation(graph: Any, op_type: str, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Make an operation of any type in a graph."""
    return graph._create_op_internal(op_type, inputs, **kwargs)


# Operations and tensors.


def operation_number(op: Any) -> int:
    """Return the number of an operation in its graph, in order of creation."""
    number: int = op._id
    return number


def output_types(op: Any) -> list[int]:
    """Return the dtypes of an operation's outputs, as numbers."""
    types: list[int] = op._output_types
    return types


def control_flow_context(op: Any) -> Any:
    """Return the TensorFlow 1 loop or branch that an operation or graph is in, or None."""
    return op._get_control_flow_context()


def set_control_flow_context(graph: Any, context: Any) -> None:
    """Set the loop or branch for new operations of a graph."""
    graph._set_control_flow_context(context)


def add_control_inputs(op: Any, operations: Sequence[Any]) -> None:
    """Make an operation wait for others."""
    op._add_control_inputs(operations)


def c_operation(op: Any) -> Any:
    """Return the C API's object for an operation."""
    return op._c_op


def c_output(tensor: Any) -> Any:
    """Return the C API's object for a tensor."""
    return tensor._as_tf_output()


def is_reference(tensor: Any) -> bool:
    """Return True if a tensor is a reference to a TensorFlow 1 variable."""
    return bool(tensor.dtype._is_ref_dtype)


def tensor_of_source(source: Any) -> Any:
    """Return the tensor that represents a source of a differentiation in a graph."""
    if hasattr(source, "handle"):
        return source.handle
    return source._ref() if hasattr(source, "_ref") else source


def variable_handle(value: Any) -> Any:
    """Return the handle of a variable of TensorFlow or Keras, or None for other values."""
    if not isinstance(value, resource_variable_ops.BaseResourceVariable):
        value = getattr(value, "_value", None)
    return getattr(value, "_handle", None)


def handle_in_layer(variable: Any) -> Any:
    """Return the handle of a variable listed by a layer, which may be distributed, or None."""
    return getattr(getattr(variable, "_value", variable), "_handle", None)


def is_symbolic(value: Any) -> bool:
    """Return True for a tensor of a graph or function."""
    return isinstance(value, tensor.Tensor) and not isinstance(value, ops.EagerTensor)


def shape_of_variable(holder: Any) -> tuple[int, ...] | None:
    """Return the shape of a variable, given its eager handle or the op that holds it."""
    if isinstance(holder, ops.Operation):
        shape = tensor_shape.TensorShape(holder.get_attr("shape"))
    else:
        data = getattr(holder, "_handle_data", None)
        if data is None or not data.is_set or not data.shape_and_type:
            return None
        shape = tensor_shape.TensorShape(data.shape_and_type[0].shape)
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


def dtype_of_handle(holder: Any) -> Any:
    """Return the dtype of a variable, given its eager handle; None for the op of a graph."""
    data = getattr(holder, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return dtypes.as_dtype(data.shape_and_type[0].dtype)


def name_of_variable(holder: Any) -> str:
    """Return the name of a variable, given its eager handle or the op that holds it."""
    name = holder.name if isinstance(holder, ops.Operation) else getattr(holder, "_name", "")
    return str(name).removesuffix(":0")


def workers() -> int:
    """Return how many processes run the program together, as a strategy has configured it."""
    server = getattr(context.context(), "_collective_ops_server_def", None)
    return 1 if server is None else sum(len(job.tasks) for job in server.cluster.job)


def variables_of_graph(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the trainable variables of a graph or function: the name, and what identifies each.

    That is the eager handle, or, in the graphs of sessions, the op that holds the variable.
    """
    captured = getattr(graph, "variables", None)
    variables = graph.get_collection("trainable_variables") if captured is None else captured
    for variable in variables:
        if variable.trainable:
            handle = variable_handle(variable)
            holder = handle if isinstance(handle, ops.EagerTensor) else variable.op
            yield str(variable.name).removesuffix(":0"), holder


# Functions.


def graph_of_function(function: Any) -> Any:
    """Return the graph that an atomic function was made from, or None if it is not known."""
    return getattr(function, "_cached_graph", None)


def graph_of_concrete(function: Any) -> Any:
    """Return the graph of a ConcreteFunction."""
    return function._func_graph


def forget_gradients(function: Any) -> None:
    """Make a ConcreteFunction build its gradient functions again when they are needed."""
    function._first_order_tape_functions.clear()
    function._higher_order_tape_functions.clear()
    function._delayed_rewrite_functions._cached_function_pairs.clear()


def indirect_captures(backward: Any) -> dict[int, Any]:
    """Map ids of tensors that a gradient's graph captured by id to its own tensors.

    Loops and branches store ids instead of tensors, and copy constants.
    """
    return {
        **getattr(backward, "_indirect_captures", {}),
        **getattr(backward, "_captured_constants", {}),
    }


#: TensorFlow's registry of the Python functions that nodes call.
host_functions: Any = script_ops._py_funcs


class _UnreadContext:
    """A control flow context that is a loop once the function of its op is complete.

    A function runs its stateful ops even if nothing reads them, except those in loops.
    """

    outer_context = None

    def __init__(self, graph: Any) -> None:
        self._graph = weakref.ref(graph)

    def IsWhileContext(self) -> bool:  # TensorFlow's name.
        return getattr(self._graph(), "experimental_acd_manager", None) is None

    def IsCondContext(self) -> bool:
        return False

    def IsXLAContext(self) -> bool:
        return False


def needs_reader(op: Any) -> None:
    """Let a stateful op of a function that is being built run only if something reads it."""
    op._set_control_flow_context(_UnreadContext(op.graph))


def keep_mask(old: Any, new: Any) -> None:
    """Give a tensor the mask that Keras attached to the one that it stands for."""
    mask = getattr(old, "_keras_mask", None)
    if mask is not None:
        new._keras_mask = mask


def host_function(token: str) -> Any:
    """Return the registry's entry `token`, or None."""
    return host_functions._funcs.get(token)


def put_host_function(token: str, function: Any) -> None:
    """Replace the registry's entry `token`."""
    host_functions._funcs[token] = function


# Sessions.


def extend_graph(session: Any) -> None:
    """Pass the operations that were added to a session's graph to its runtime."""
    session._extend_graph()


def run_session(session: Any, fetches: list[Any]) -> list[Any]:
    """Return the values of outputs of the C API, with nothing fed."""
    values: list[Any] = session._call_tf_sessionrun(None, {}, fetches, [], None)
    return values


# Exceptions.


def set_message(error: Any, message: str) -> None:
    """Set the message of an `OpError`."""
    error._message = message


def keep_from_keras(error: BaseException) -> None:
    """Make Keras raise an exception unchanged, instead of a new one with an extended message."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
