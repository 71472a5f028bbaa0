"""Values that layers take and return in eager mode, each as an operator that returns its input.

Owns the execution of these operators, which only tools that ask for values of layers are shown.
"""

from __future__ import annotations

from typing import Any

from amanda_core.driver_kit import Activation, replace_first
from amanda_driver_tf.execution.eager.execute import Call, run
from amanda_driver_tf.graphs.layer_calls import ARRAYS
from amanda_driver_tf.identity.places import Forward
from amanda_driver_tf.operators.op_types import op_type_of
from amanda_driver_tf.tensorflow_internals.modules import context, dtypes, ops
from amanda_driver_tf.tensorflow_internals.objects import keep_mask
from amanda_driver_tf.threads import call_quietly

__all__ = ["show_value"]


def show_value(place: Forward, activation: Activation, op_type: str, value: Any) -> Any:
    """Show the first tensor in what a layer takes or returns, and return the value as edited.

    Args:
        place: Where the layer is called.
        activation: Its call.
        op_type: `MODULE_INPUT` or `MODULE_OUTPUT`.
        value: Its arguments, or its result.
    """
    if not place.session.calls.shows(op_type, activation.scope.path):
        return value
    record = place.program.sites.of_layer(activation, op_type_of(op_type))

    def show(tensor: Any) -> Any:
        if record.idle == place.session.epoch and place.control.caching:
            return tensor
        if not isinstance(tensor, ops.EagerTensor):
            tensor = call_quietly(ops.convert_to_tensor, tensor)
        if tensor.dtype == dtypes.resource:
            return tensor
        attrs = ("T", tensor.dtype.as_datatype_enum)
        call = Call("Identity", 1, [tensor], attrs, context.context(), None)
        (shown,) = run(place, record, call, (), records=True)
        keep_mask(tensor, shown)
        return shown

    return replace_first(value, ARRAYS, show)
