"""What the identity of ops has to know of TensorFlow: frames, layers, variables.

The rule itself is the core's (`amanda_core.sites`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from amanda_core.scopes import Labels, Scope, Scopes
from amanda_core.sites import Rules
from amanda_driver_tf._eager.frames import kind_of, zone_of
from amanda_driver_tf._eager.op_types import OpType
from amanda_driver_tf._eager.records import Operands
from amanda_driver_tf._eager.tokens import TOKENS
from amanda_driver_tf._tensorflow_internals.modules import ops
from amanda_driver_tf._tensorflow_internals.objects import handle_in_layer, variable_handle

__all__ = ["OPTIMIZER", "RULES", "new_labels", "new_scopes", "operands_of"]

_EagerTensor = ops.EagerTensor
# A value that an operand is in most calls, and that is no variable.
_NO_VARIABLES: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, list, tuple, type(None)}
)

#: Ops of an optimizer: a variable that it reads is none of the model's reads.
OPTIMIZER = Scope(-1, "", "", zone="optimizer")

#: Which operands are weights, `operands_of` says: a tensor tells whose value it is.
RULES = Rules(kind_of=kind_of, zone_of=zone_of, is_layered=True)


def new_scopes() -> Scopes:
    """Return the scopes of Keras' layers, none of which has been called."""
    return Scopes(lambda layer: {}, _variables_of, lambda layer: str(layer.name))


def new_labels() -> Labels:
    """Return labels for tensors, of which none has one."""
    return Labels((), TOKENS.signed)


def _variables_of(layer: Any) -> Iterator[tuple[str, Any]]:
    for variable in layer.variables:
        held = handle_in_layer(variable)
        if held is not None:
            # Of tf_keras they are TensorFlow's own.
            yield str(getattr(variable, "path", variable.name)), held


def operands_of(op_type: OpType, args: Sequence[Any], inside: bool) -> Operands:
    """Return the operands of a call that tell it apart; `inside` a layer or not."""
    found: Operands = ()
    for position, value in zip(op_type.positions, args, strict=False):
        kind = type(value)
        if kind is _EagerTensor:
            token = value._amanda_source
            if token.__class__ is not int:
                if position not in op_type.handles:
                    continue
                token = TOKENS.of(value)
            # Watched tensors count only where no activation counts occurrences, and not in front:
            # what flows stands there. Constants never do.
            elif not token or (token < 0 and (inside or not position)):
                continue
        elif kind in _NO_VARIABLES:
            continue
        else:
            handle = variable_handle(value)
            if handle is None:
                continue
            token = TOKENS.of(handle)
        found = (*found, (position, token))
    return found
