"""TensorFlow's part of the rule of op identity: frames, layers, variables.

The rule itself is in the core (`amanda_core.identity.sites`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from amanda_core.driver_kit import Labels, Rules, Scope, Scopes, distinguishes
from amanda_driver_tf.identity.frames import kind_of
from amanda_driver_tf.identity.records import Operands
from amanda_driver_tf.identity.tokens import TOKENS
from amanda_driver_tf.identity.zones import zone_of
from amanda_driver_tf.operators.op_types import OpType
from amanda_driver_tf.tensorflow_internals.modules import ops
from amanda_driver_tf.tensorflow_internals.objects import handle_in_layer, variable_handle

__all__ = [
    "OPTIMIZER",
    "RULES",
    "handle_of",
    "new_labels",
    "new_scopes",
    "operands_of",
    "variables_of",
]

_EagerTensor = ops.EagerTensor
# Types of most operands that are not variables.
_NO_VARIABLES: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, list, tuple, type(None)}
)

#: Ops of an optimizer, whose reads of variables are not the model's.
OPTIMIZER = Scope(-1, "", "", zone="optimizer")

#: Tensors are marked with their variable: `operands_of` reads the marks.
RULES = Rules(kind_of=kind_of, zone_of=zone_of, is_layered=True)


def new_scopes() -> Scopes:
    """Return scopes for Keras' layers."""
    return Scopes(lambda layer: {}, _variables_of, lambda layer: str(layer.name))


def new_labels() -> Labels:
    """Return labels for tensors."""
    return Labels(TOKENS.signed)


def variables_of(layers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and handles of the variables of layers."""
    for layer in layers:
        for name, _, handle in _variables_of(layer):
            yield name, handle


def handle_of(value: Any) -> Any:
    """Return the handle of the variable whose value a tensor is, or that it is a handle of."""
    token = value._amanda_source if isinstance(value, _EagerTensor) else None
    if token.__class__ is not int or token <= 0:
        handle = variable_handle(value)
        return handle if isinstance(handle, _EagerTensor) else None
    return TOKENS.find(token)


def _variables_of(layer: Any) -> Iterator[tuple[str, Any, Any]]:
    for variable in layer.variables:
        held = handle_in_layer(variable)
        if held is not None:
            # Variables of tf_keras are those of TensorFlow, which have no path.
            yield str(getattr(variable, "path", variable.name)), layer, held


def operands_of(op_type: OpType, args: Sequence[Any], inside: bool) -> Operands:
    """Return the operands of a call that distinguish it, by the rule of the core.

    Args:
        op_type: The op type.
        args: The arguments.
        inside: Whether it is called inside a layer.
    """
    found: Operands = ()
    for position, value in zip(op_type.positions, args, strict=False):
        token = _token_of(value, position in op_type.handles)
        if distinguishes(token, position, inside):
            found = (*found, (position, token))
    return found


def _token_of(value: Any, is_handle: bool) -> int:
    """Return the token of a tensor or of the variable that a value is, which marks it.

    It is above 0 for variables and their values, below 0 for tensors that a tape watches, and 0 for
    constants and for what is not a tensor.
    """
    if type(value) is not _EagerTensor:
        handle = None if type(value) in _NO_VARIABLES else variable_handle(value)
        return 0 if handle is None else TOKENS.of(handle)
    token = value._amanda_source
    if token.__class__ is int:
        return int(token)
    return TOKENS.of(value) if is_handle else 0
