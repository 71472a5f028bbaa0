"""Operators that leave their weights to others: calls that make views, or that run modules.

Owns the answer for one call. Some operators make a view or a copy, depending on their input's
layout. The driver calls these a second time to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch

from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.operators.bindings import CASTS, CONVERSIONS, GETTERS, SLOTS
from amanda_driver_torch.operators.operator import Operator
from amanda_driver_torch.operators.signature import outputs_of
from amanda_driver_torch.threads.modes import call_with_gradients
from amanda_driver_torch.torch_internals.modules import modules_in, parameters_of
from amanda_driver_torch.torch_internals.tensor_attributes import memory_of

__all__ = ["makes_views", "passes_weights_on"]

#: Operators without a schema that tells whether they share memory.
_UNTOLD = CONVERSIONS | SLOTS


def passes_weights_on(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if other operators compute with the weights that a call reads.

    That is so for views, for casts between a distributed tensor and its local part, and for an
    `autograd.Function` that runs a module: it gets the module's parameters only so that they get
    gradients, and asks for these by the parameters themselves.
    """
    if operator.op_type in CASTS:
        return True
    given = (*args, *kwargs.values())
    owners = [one.__self__ if type(one) is MethodType else one for one in given]
    modules = [owner for owner in owners if isinstance(owner, torch.nn.Module)]
    if modules:
        parts = [part for module in modules for _, part in modules_in(module)]
        own = {id(parameter) for part in parts for parameter in parameters_of(part).values()}
        if any(id(tensor) in own for tensor in tensors_in(given)):
            return True
    return makes_views(operator, args, kwargs)


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
    result = call_with_gradients(False, partial(operator.func, *args, **kwargs))
    outputs = tensors_in(outputs_of(result))
    given = {memory_of(value) for value in tensors_in((*args, *kwargs.values()))}
    return all(memory_of(output) in given for output in outputs)
