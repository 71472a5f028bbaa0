"""Arithmetic of the edits, with the tensors of each framework.

Owns how an array becomes a tensor of the framework's, and how parts of a value stay as they are.
A driver's tensors that work like NumPy's arrays need nothing here.
"""

from __future__ import annotations

from typing import Any

from amanda_core import OpContext

__all__ = ["ARITHMETIC", "RULES", "Arithmetic"]

#: Key of a context: the arithmetic of its tensors.
ARITHMETIC = "steer.arithmetic"


class Arithmetic:
    """Arithmetic of arrays, and of tensors that work like them."""

    def tensor(self, array: Any, like: Any) -> Any:
        """Return an array as a tensor of the dtype of another one, and where that one is."""
        import numpy

        return numpy.asarray(array, like.dtype)

    def mask(self, array: Any, like: Any) -> Any:
        """Return an array of truth values as a tensor."""
        return array

    def where(self, mask: Any, new: Any, old: Any) -> Any:
        """Return `new` where the mask is true, and the very bits of `old` elsewhere."""
        import numpy

        return numpy.where(mask, new, old)

    def sum_last(self, value: Any) -> Any:
        """Return the sum over the last axis, which stays with size 1."""
        return value.sum(-1, keepdims=True)

    def zeros(self, value: Any) -> Any:
        """Return zeros of the same shape, dtype and place."""
        import numpy

        return numpy.zeros_like(value)


class _Torch(Arithmetic):
    def tensor(self, array: Any, like: Any) -> Any:
        import torch

        return torch.as_tensor(array).to(like.device, like.dtype)

    def mask(self, array: Any, like: Any) -> Any:
        import torch

        return torch.as_tensor(array).to(like.device)

    def where(self, mask: Any, new: Any, old: Any) -> Any:
        import torch

        return torch.where(mask, new, old)

    def zeros(self, value: Any) -> Any:
        import torch

        return torch.zeros_like(value)


class _TensorFlow(Arithmetic):
    def tensor(self, array: Any, like: Any) -> Any:
        import tensorflow

        return tensorflow.cast(tensorflow.convert_to_tensor(array), like.dtype)

    def mask(self, array: Any, like: Any) -> Any:
        import tensorflow

        return tensorflow.convert_to_tensor(array)

    def where(self, mask: Any, new: Any, old: Any) -> Any:
        import tensorflow

        return tensorflow.where(mask, new, old)

    def sum_last(self, value: Any) -> Any:
        import tensorflow

        return tensorflow.reduce_sum(value, axis=-1, keepdims=True)

    def zeros(self, value: Any) -> Any:
        import tensorflow

        return tensorflow.zeros_like(value)


def _rule(arithmetic: Arithmetic) -> Any:
    def rule(context: OpContext) -> None:
        context[ARITHMETIC] = arithmetic

    return rule


#: Rules for a `MappingTool`.
RULES = [
    ["*", _rule(Arithmetic())],
    ["tensorflow", _rule(_TensorFlow())],
    ["pytorch", _rule(_Torch())],
]
