"""Functions compiled by XLA, and ops that a CPU can run only if XLA compiles them.

Owns what happens to such a function when a tool's routine runs in it. XLA cannot call Python, so
the function runs without XLA. Ops that have no kernel without XLA are then compiled one by one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2

from amanda_driver_tf.graphs.body import Node, outputs_of
from amanda_driver_tf.tensorflow_internals.modules import config, kernels, tensor_shape
from amanda_driver_tf.tensorflow_internals.names import COMPILED_BY_XLA, NOT_INLINED

__all__ = ["compile_alone", "compiled_call", "is_compiled", "needs_xla", "release"]

_NUMBERS = itertools.count(1)

# Convolution -> (images, filters), each the index of an input, or "output". Inputs that are sizes
# do not help.
_CONVOLUTIONS: dict[str, tuple[int | str, int | str]] = {
    "Conv2D": (0, 1),
    "Conv2DBackpropFilter": (0, "output"),
    "Conv2DBackpropInput": ("output", 1),
    "Conv3D": (0, 1),
    "Conv3DBackpropFilterV2": (0, "output"),
    "Conv3DBackpropInputV2": ("output", 1),
}
# oneDNN runs them only fused with their forward op, which a routine in between prevents.
_GRADIENTS_OF_POOLS = ("MaxPoolGrad", "MaxPool3DGrad")


def is_compiled(attributes: Any) -> bool:
    """Return True if the attributes of a function or call request compilation by XLA."""
    return COMPILED_BY_XLA in attributes and bool(attributes[COMPILED_BY_XLA].b)


def release(attributes: Any) -> None:
    """Remove the request for compilation by XLA from a function's attributes."""
    for name in (COMPILED_BY_XLA, NOT_INLINED):
        if name in attributes:
            del attributes[name]


def compiled_call(compiled: bool) -> dict[str, Any]:
    """Return the attributes that make XLA compile a call, or not."""
    return {name: attr_value_pb2.AttrValue(b=compiled) for name in (COMPILED_BY_XLA, NOT_INLINED)}


def needs_xla(node: Node, released: bool) -> bool:
    """Return True if a node may not run without XLA.

    Args:
        node: The node.
        released: Whether XLA should have compiled its function.
    """
    if node.op_type in _GRADIENTS_OF_POOLS:
        return _is_channels_first(node.op)
    if not released:
        return False
    return (
        _is_channels_first(node.op)
        or _is_unusual_convolution(node.op)
        or not _has_kernel(node.op.node_def)
    )


def _is_channels_first(op: Any) -> bool:
    return bool(op.node_def.attr["data_format"].s.startswith(b"NC"))


def _is_unusual_convolution(op: Any) -> bool:
    """Return True if a convolution is dilated or grouped, or may be."""
    places = _CONVOLUTIONS.get(op.type)
    if places is None:
        return False
    if any(size != 1 for size in op.node_def.attr["dilations"].list.i):
        return True
    images, filters = (
        (op.outputs[0] if place == "output" else op.inputs[place]).shape for place in places
    )
    if images.rank is None or filters.rank is None:
        return True
    channels = tensor_shape.dimension_value(images[-1])
    return channels is None or channels != tensor_shape.dimension_value(filters[-2])


@functools.cache
def _kernels_of(op_type: str) -> Any:
    return kernels.get_registered_kernels_for_op(op_type).kernel


def _has_kernel(definition: Any) -> bool:
    """Return True if any available device has a kernel for a node."""
    found = _kernels_of(definition.op)
    devices = {"DEFAULT", *(device.device_type for device in config.list_logical_devices())}
    return not found or any(
        kernel.device_type in devices
        and all(_is_met(constraint, definition.attr) for constraint in kernel.constraint)
        for kernel in found
    )


def _is_met(constraint: Any, attributes: Any) -> bool:
    """Return True if a kernel's constraint allows the attribute of a node: a type, or any other."""
    if constraint.name not in attributes:
        return True
    given = attributes[constraint.name]
    return all(
        value in allowed
        for field, allowed in constraint.allowed_values.list.ListFields()
        for value in getattr(given.list, field.name) or [getattr(given, field.name)]
    )


def compile_alone(fdef: Any, nodes: Sequence[Node]) -> list[Any]:
    """Let XLA compile some nodes of a function, each in a function of its own.

    Args:
        fdef: The FunctionDef; it is changed in place.
        nodes: The nodes.

    Returns:
        The FunctionDefs of the new functions.
    """
    by_name = {definition.name: definition for definition in fdef.node_def}
    texts: dict[str, str] = {}
    made = []
    for node in nodes:
        definition = by_name[node.name]
        names, dtypes = outputs_of(definition)
        function = _function_of(definition, [value.base for value in node.inputs], names, dtypes)
        made.append(function)
        call = node_def_pb2.NodeDef(
            name=definition.name, device=definition.device, input=definition.input
        )
        call.op = "StatefulPartitionedCall" if node.op.op_def.is_stateful else "PartitionedCall"
        call.attr["f"].func.name = function.signature.name
        call.attr["Tin"].list.type.extend(value.base for value in node.inputs)
        call.attr["Tout"].list.type.extend(dtypes)
        _set(call.attr)
        definition.CopyFrom(call)
        texts.update((old, f"{node.name}:output:{index}") for index, old in enumerate(names))
    for definition in fdef.node_def:
        for index, text in enumerate(definition.input):
            if text in texts:
                definition.input[index] = texts[text]
    for name, text in fdef.ret.items():
        if text in texts:
            fdef.ret[name] = texts[text]
    return made


def _function_of(
    definition: Any, given: Sequence[int], names: Sequence[str], dtypes: Sequence[int]
) -> Any:
    """Return a FunctionDef that consists of one node."""
    fdef = function_pb2.FunctionDef()
    fdef.signature.name = f"amanda_xla_{next(_NUMBERS)}_{definition.op}"
    inner = fdef.node_def.add()
    inner.CopyFrom(definition)
    del inner.input[:]
    for index, dtype in enumerate(given):
        argument = fdef.signature.input_arg.add(name=f"input_{index}")
        argument.type = dtype
        inner.input.append(argument.name)
    for index, (text, dtype) in enumerate(zip(names, dtypes, strict=True)):
        result = fdef.signature.output_arg.add(name=f"output_{index}")
        result.type = dtype
        fdef.ret[result.name] = text
    _set(fdef.attr)
    return fdef


def _set(attributes: Any) -> None:
    for name, value in compiled_call(True).items():
        attributes[name].CopyFrom(value)
