"""Control flow contexts: the loop or branch of TensorFlow 1 that an op stands in.

Owns the question whether the gradient of an op is computed in another one. TensorFlow leads what it
needs there by ways of its own (stacks, invariants), on which there is one version of each value.
"""

from __future__ import annotations

from typing import Any

from amanda_driver_tf._graphs.records import Record, components
from amanda_driver_tf._tensorflow_internals.modules import control_flow_util
from amanda_driver_tf._tensorflow_internals.objects import control_flow_context

__all__ = ["is_led_elsewhere"]


def is_led_elsewhere(owner: Record) -> bool:
    """Return True if a gradient is computed in a loop or branch that its op does not stand in."""
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
