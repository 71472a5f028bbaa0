"""Gradient functions with routines, as a part of the loop body that pfor vectorizes.

TensorFlow calls a gradient function there by its name, and pfor vectorizes its ops. Those that call
a routine it runs in a loop over the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from amanda_driver_tf.execution.functions.twins import Twin
from amanda_driver_tf.gradients.eager.hosted import keep_while_built
from amanda_driver_tf.tensorflow_internals.modules import atomic_function, context, function_type

__all__ = ["embeddable", "original_input"]

_NUMBERS = itertools.count(1)


def original_input(tensor: Any) -> Any:
    """Return the tensor that was captured as this one by the functions that are being traced."""
    graph = getattr(tensor, "graph", None)
    for outer, inner in getattr(graph, "captures", ()):
        if inner is tensor:
            return original_input(outer)
    return tensor


def embeddable(twin: Twin, inputs: Sequence[Any]) -> Any:
    """Return a twin as a function that graphs can call.

    Args:
        twin: The twin of a gradient function.
        inputs: What it is called with.
    """
    keep_while_built(twin)
    definition = context.context().get_function_def(twin.name.decode())
    return _function(definition, [tensor.shape for tensor in inputs])


def _function(definition: Any, shapes: Sequence[Any] | None = None) -> Any:
    """Return a function of this definition.

    It has a name of its own, under which TensorFlow removes it from the runtime when it dies.
    """
    copy = type(definition)()
    copy.CopyFrom(definition)
    copy.signature.name = f"{definition.signature.name}_{next(_NUMBERS)}"
    children = [_renamed(called) for node in copy.node_def for called in _called(node)]
    arguments = copy.signature.input_arg
    pairs = zip(arguments, shapes or [None] * len(arguments), strict=True)
    given = [tf.TensorSpec(shape, argument.type) for argument, shape in pairs]
    results = tuple(tf.TensorSpec(None, arg.type) for arg in copy.signature.output_arg)
    types = function_type.from_structured_signature((tuple(given), {}), results)
    context.context().add_function_def(copy)
    return atomic_function.AtomicFunction(copy.signature.name, context.context(), types, children)


def _called(node: Any) -> list[Any]:
    """Return the names of the functions that a node calls, which can be set."""
    values = node.attr.values()
    found = [value.func for value in values if value.HasField("func")]
    return found + [one for value in values for one in value.list.func]


def _renamed(called: Any) -> Any:
    found = _function(context.context().get_function_def(called.name))
    called.name = found.name
    return found
