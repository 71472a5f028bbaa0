"""Writes a rewritten body as a FunctionDef.

Owns the names, attributes and signature of what is written. It makes no decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2

from amanda_driver_tf.graphs.body import Body, Node, Value, outputs_of
from amanda_driver_tf.insertion.host_functions import Listener, register
from amanda_driver_tf.insertion.nodes import Argument, Host, Inlined, Mark, New, Plain
from amanda_driver_tf.tensorflow_internals.modules import context
from amanda_driver_tf.tensorflow_internals.names import INPUT_SHAPES

__all__ = [
    "Names",
    "Written",
    "attr_func",
    "attr_int",
    "attr_shape",
    "attr_type",
    "attr_types",
    "name_of",
    "node_defs",
    "plain",
    "write_function",
]

_PREFIX = "amanda__"


def attr_types(dtypes: Sequence[int]) -> Any:
    """Return an attribute that is a list of types."""
    value = attr_value_pb2.AttrValue()
    value.list.type.extend(dtypes)
    return value


def attr_type(dtype: int) -> Any:
    """Return an attribute that is a type."""
    return attr_value_pb2.AttrValue(type=dtype)


def attr_int(number: int) -> Any:
    """Return an attribute that is an integer."""
    return attr_value_pb2.AttrValue(i=number)


def attr_shape(sizes: Sequence[int]) -> Any:
    """Return an attribute that is a shape."""
    value = attr_value_pb2.AttrValue()
    value.shape.CopyFrom(tf.TensorShape(sizes).as_proto())
    return value


def attr_func(name: str) -> Any:
    """Return an attribute that is a function."""
    value = attr_value_pb2.AttrValue()
    value.func.name = name
    return value


class Names:
    """Hands out names that are not taken yet."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = taken

    def take(self, wish: str) -> str:
        """Reserve and return a free name that resembles `wish`."""
        base = _PREFIX + wish.replace("/", "_")
        name, number = base, 1
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name


class Written:
    """The objects that must stay alive as long as a written function may run.

    Args:
        listener: Receives the exceptions that host functions raise.

    Attributes:
        alive: Host functions and traced routines.
        names: Names of the functions that were written.
        has_hosts: Whether any written function calls Python, or records marks.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.alive: list[Any] = []
        self.names: list[str] = []
        self.has_hosts = False


def node_defs(new: Sequence[New], names: Names, written: Written) -> list[Any]:
    """Name new nodes and return their NodeDefs, still without inputs."""
    found: list[Any] = []
    for node in new:
        definition = node_def_pb2.NodeDef()
        node.name = definition.name = names.take(node.name)
        if isinstance(node, Host):
            written.has_hosts = True
            host = register(node.function, written.listener, node.dtypes)
            written.alive.append(host)
            definition.op = "EagerPyFunc"
            definition.attr["token"].s = host.token.encode()
            definition.attr["is_async"].b = False
            definition.attr["Tin"].CopyFrom(attr_types([plain(v.dtype) for v in node.inputs]))
            definition.attr["Tout"].CopyFrom(attr_types(node.dtypes))
        elif isinstance(node, Inlined):
            written.alive.append(node.function)
            found += _call_of_routine(node, definition, names)
        elif isinstance(node, Plain):
            written.has_hosts = written.has_hosts or isinstance(node, Mark)
            definition.op = node.op_type
            for key, value in node.attrs.items():
                definition.attr[key].CopyFrom(value)
        found.append(definition)
    return found


def plain(dtype: int) -> int:
    """Return a dtype without the reference to it."""
    return dtype - 100 if dtype > 100 else dtype


def _call_of_routine(node: Inlined, definition: Any, names: Names) -> list[Any]:
    constants = []
    dtypes = [plain(value.dtype) for value in node.inputs]
    for captured in node.function.graph.external_captures:
        constant = node_def_pb2.NodeDef()
        constant.name = names.take(f"{node.name}/constant")
        constant.op = "Const"
        constant.attr["dtype"].type = captured.dtype.as_datatype_enum
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(captured.numpy()))
        if node.anchor is not None:
            constant.input.append(f"^{node.anchor.name}")
        constants.append(constant)
        dtypes.append(captured.dtype.as_datatype_enum)
    node.constants = [constant.name for constant in constants]
    # A stateless call without outputs would be pruned.
    definition.op = "PartitionedCall" if node.dtypes else "StatefulPartitionedCall"
    definition.attr["f"].CopyFrom(attr_func(node.function.name.decode()))
    definition.attr["Tin"].CopyFrom(attr_types(dtypes))
    definition.attr["Tout"].CopyFrom(attr_types(node.dtypes))
    return constants


def write_function(
    body: Body,
    name: str,
    new: Sequence[New],
    kept: Sequence[New | Node],
    arguments: Sequence[Argument],
    results: Sequence[Value],
    written: Written,
) -> Any:
    """Return the FunctionDef of a rewritten body.

    Args:
        body: The body.
        name: Name of the new function.
        new: New nodes.
        kept: Nodes that must run though nothing reads them.
        arguments: New arguments, appended to the existing ones.
        results: New results, appended to the existing ones.
        written: Collects what must stay alive.
    """
    fdef = function_pb2.FunctionDef()
    fdef.CopyFrom(body.fdef)
    fdef.signature.name = name
    taken = {node.name for node in body.nodes} | {node.name for node in body.arguments}
    names = Names(taken | {argument.name for argument in fdef.signature.output_arg})
    # This attribute lists one shape per argument, and has none for new arguments.
    for argument in arguments:
        argument.name = names.take(argument.name)
        definition = fdef.signature.input_arg.add()
        definition.name, definition.type = argument.name, argument.dtypes[0]
    if INPUT_SHAPES in fdef.attr and arguments:
        del fdef.attr[INPUT_SHAPES]
    by_name = {definition.name: definition for definition in fdef.node_def}
    texts = _Texts(by_name)
    additions = node_defs(new, names, written)
    for node in body.nodes:
        texts.rewire(by_name[node.name], node)
    fdef.node_def.extend(additions)
    by_name = {definition.name: definition for definition in fdef.node_def}
    for addition in new:
        if not isinstance(addition, Argument):
            texts.wire(by_name[addition.name], addition)
    for key, value in body.results.items():
        fdef.ret[key] = texts.of(value)
    for value in results:
        definition = fdef.signature.output_arg.add()
        definition.name = names.take("result")
        definition.type = plain(value.dtype)
        fdef.ret[definition.name] = texts.of(value)
    for each in kept:
        fdef.signature.control_output.append(each.name)
        fdef.control_ret[each.name] = each.name
    if written.has_hosts or kept:
        fdef.signature.is_stateful = True
    return fdef


class _Texts:
    """How a FunctionDef refers to values."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self._names: dict[str, list[str]] = {}

    def of(self, value: Value) -> str:
        """Return the text by which a FunctionDef refers to a value."""
        node = value.node
        if isinstance(node, Argument) or (isinstance(node, Node) and node.is_argument):
            return str(node.name)
        if isinstance(node, Node):
            names = self._names.get(node.name)
            if names is None:
                names = self._names[node.name] = outputs_of(self._definitions[node.name])[0]
            if value.slot < len(names):
                return names[value.slot]
        elif isinstance(node, Plain):
            return f"{node.name}:{node.output_names[value.slot]}"
        # Calls, branches, loops and host functions have one list of outputs of this name.
        return f"{node.name}:output:{value.slot}"

    def rewire(self, definition: Any, node: Node) -> None:
        """Write the new inputs and attributes of an existing node."""
        inputs = [self.of(value) for value in node.inputs]
        inputs += [f"^{name_of(control)}" for control in node.controls]
        if list(definition.input) != inputs:
            del definition.input[:]
            definition.input.extend(inputs)
        definition.op = node.op_type
        for key, value in node.attrs.items():
            definition.attr[key].CopyFrom(value)

    def wire(self, definition: Any, node: New) -> None:
        """Write the inputs of a new node."""
        definition.input.extend(self.of(value) for value in node.inputs)
        if isinstance(node, Inlined):
            definition.input.extend(f"{name}:output:0" for name in node.constants)
        definition.input.extend(f"^{name_of(control)}" for control in node.controls)


def name_of(control: Any) -> str:
    """Return the name of a control input, given as a name or a node."""
    return control if isinstance(control, str) else str(control.name)


def add_function(fdef: Any) -> None:
    """Register a function with TensorFlow's runtime."""
    context.context().add_function_def(fdef)
