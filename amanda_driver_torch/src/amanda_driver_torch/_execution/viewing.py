"""Operators that make views: calls that compute and copy nothing.

Owns the answer for one call. Some operators make a view or a copy, depending on their input's
layout. The driver calls these a second time to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amanda_driver_torch._autograd.nodes import tensors_in
from amanda_driver_torch._operators.bindings import CONVERSIONS, GETTERS, SLOTS
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._operators.signature import outputs_of
from amanda_driver_torch._torch.tensor_attributes import memory_of

__all__ = ["makes_views"]

#: Operators without a schema that tells whether they share memory.
_UNTOLD = CONVERSIONS | SLOTS


def makes_views(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of an operator makes only views of its inputs.

    Args:
        operator: The operator.
        args: Positional arguments of the call.
        kwargs: Keyword arguments.
    """
    if operator.op_type in GETTERS:
        return True
    if not (operator.views or operator.op_type in _UNTOLD) or operator.op_type == "__setitem__":
        return False
    with torch.no_grad():
        outputs = tensors_in(outputs_of(operator.func(*args, **kwargs)))
    given = {memory_of(value) for value in tensors_in((*args, *kwargs.values()))}
    return all(memory_of(output) in given for output in outputs)
