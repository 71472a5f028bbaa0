"""When not to look: tracers and transforms that run a model on stand-ins for tensors.

Owns the questions to torch whether one of them is active in this thread. Their operators are not
executions: no value could be given to a routine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["MACHINERY", "STAND_INS", "reason_to_look_away"]

# Modes of torch.utils._python_dispatch by name: importing them would load half of Inductor.
_STAND_INS = frozenset(
    {
        "FakeTensorMode",
        "ProxyTorchDispatchMode",
        "FunctionalTensorMode",
        "PreDispatchTorchFunctionMode",
    }
)
_FAKE = frozenset({"FakeTensor", "FunctionalTensor", "ProxyTensor", "Proxy"})

#: Modules whose own calls of operators are bookkeeping, such as making stand-ins for parameters.
MACHINERY = ("torch._subclasses", "torch._dynamo", "torch._functorch", "torch.fx", "torch.export")

_FUNCTORCH = (
    "Operators inside torch.func transforms (vmap, grad, jvp, ...) run uninstrumented: their "
    "values are wrapped and have no graph to edit."
)


#: Answers of these are something true whenever `reason_to_look_away` may have a reason that does
#: not lie in the type of an argument.
STAND_INS = (
    torch._C._get_tracing_state,
    torch._C._are_functorch_transforms_active,
    torch._C._len_torch_dispatch_stack,
)

_fake: dict[type, bool] = {torch.Tensor: False, torch.nn.Parameter: False, int: False, tuple: False}


def reason_to_look_away(args: Sequence[Any]) -> str | None:
    """Why an operator about to run is not to be instrumented.

    Returns:
        None where it is; an empty string where nobody expects it; else a notice for the user.
    """
    if torch._C._get_tracing_state() is not None:
        return ""
    if torch._C._are_functorch_transforms_active():
        return _FUNCTORCH
    for index in range(torch._C._len_torch_dispatch_stack()):
        if type(torch._C._get_dispatch_stack_at(index)).__name__ in _STAND_INS:
            return ""
    for value in args:
        kind = type(value)
        fake = _fake.get(kind)
        if fake is None:
            fake = _fake[kind] = kind.__name__ in _FAKE
        if fake:
            return ""
    return None
