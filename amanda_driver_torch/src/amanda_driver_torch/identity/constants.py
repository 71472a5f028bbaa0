"""Which inputs of an operator are constants: parameters, buffers of modules and all non-tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amanda_core.driver_kit import OUTSIDE, Known, Scopes
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.modules import buffers_of, modules_in
from amanda_driver_torch.torch_internals.tensor_attributes import is_weight, requires_grad

__all__ = ["Constants"]


class Constants:
    """Tells the constants among the inputs of operators.

    A module may get another buffer at any time, but to look through all modules at each operator
    would take the square of their number. So the modules that run now are asked each time. The
    others are listed when their model runs first, and again after as many questions as there are
    modules.

    Args:
        scopes: The modules that have been called.
    """

    def __init__(self, scopes: Scopes) -> None:
        self._scopes = scopes
        self._buffers: Known[bool] = Known()
        self._listed: Known[bool] = Known()
        self._modules = self._asked = 0

    def __call__(self, value: Any) -> Any:
        """Return a constant itself, and None for another value."""
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            return value
        if is_weight(value):
            return value
        # Not for each result of an operator in training.
        return value if not requires_grad(value) and self._is_buffer(value) else None

    def _is_buffer(self, tensor: torch.Tensor) -> bool:
        scope = STATE.activations[-1].scope if STATE.activations else OUTSIDE
        for module in self._scopes.around(scope):
            if any(tensor is buffer for buffer in buffers_of(module).values()):
                return True
        if self._buffers.get(tensor):
            return True
        self._asked += 1
        root = self._scopes.root(scope.root)
        if self._asked > self._modules:
            self._listed, self._modules, self._asked = Known(), 0, 0
            roots = self._scopes.roots()
        elif root is not None and not self._listed.get(root):
            roots = [root]
        else:
            return False
        for root in roots:
            self._listed.set(root, True)
            for _, module in modules_in(root):
                self._modules += 1
                for buffer in buffers_of(module).values():
                    if buffer is not None:
                        self._buffers.set(buffer, True)
        return bool(self._buffers.get(tensor))
