"""Control flow contexts: the TensorFlow 1 loop or branch that an op belongs to.

Owns the question whether the gradient of an op is computed in another one. TensorFlow transfers the
values that such a gradient needs by its own means (stacks, invariants), which hold only one version
of each value.
"""

from __future__ import annotations

from typing import Any

from amanda_driver_tf.graphs.records import Record, components
from amanda_driver_tf.tensorflow_internals.modules import control_flow_util
from amanda_driver_tf.tensorflow_internals.objects import control_flow_context

__all__ = ["is_differentiated_elsewhere"]


def is_differentiated_elsewhere(owner: Record) -> bool:
    """Return True if a gradient is computed in a loop or branch that does not contain its op."""
    around = [context := control_flow_context(owner.forward)]
    while context is not None:
        context = context.outer_context
        around.append(context)
    places = (
        control_flow_util.GetOutputContext(tensor.op)
        for gradient in (*owner.in_grads, *owner.out_grads)
        for tensor in components(gradient)
    )
    return any(_is_loop_or_branch(place) and place not in around for place in places)


def _is_loop_or_branch(context: Any) -> bool:
    return context is not None and (context.IsWhileContext() or context.IsCondContext())
