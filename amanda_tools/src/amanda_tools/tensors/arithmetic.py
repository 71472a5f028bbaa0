"""Arithmetic of the tools that change values, with the tensors of each framework.

Owns the few functions in which the frameworks differ. Drivers whose tensors work like NumPy's
arrays need nothing here.
"""

from __future__ import annotations

from typing import Any

from amanda_core import OpContext
from amanda_core.facts import NotReadableError

__all__ = ["ARITHMETIC", "NOT_ARRAYS", "RULES", "Arithmetic"]

#: Key of a context: the arithmetic of its tensors.
ARITHMETIC = "tensors.arithmetic"
#: Why an unknown framework is not supported.
NOT_ARRAYS = "its tensors are not NumPy's arrays"


class Arithmetic:
    """Arithmetic of NumPy's arrays, and of tensors that work like them."""

    #: Whether steps can be learned.
    learns = False

    def suits(self, value: Any) -> bool:
        """Return True if this is the arithmetic of a value."""
        import numpy

        return isinstance(value, numpy.ndarray)

    def is_floating(self, value: Any) -> bool:
        """Return True for a tensor of real floating-point numbers, in routines of graphs."""
        try:
            return "float" in str(value.dtype)
        except AttributeError:  # It was a tensor when the op was analysed.
            return False

    def wide(self, value: Any) -> Any:
        """Return a value with at least 32 bits an element."""
        import numpy

        return value if value.dtype.itemsize >= 4 else value.astype(numpy.float32)

    def like(self, value: Any, other: Any) -> Any:
        """Return a value in the dtype of another one."""
        return value.astype(other.dtype)

    def round(self, value: Any) -> Any:
        """Return the nearest integers, of two equally near ones the even one."""
        import numpy

        return numpy.round(value)

    def clip(self, value: Any, lowest: float, highest: float) -> Any:
        """Return the values limited to an interval."""
        import numpy

        return numpy.clip(value, lowest, highest)

    def largest(self, value: Any, axes: tuple[int, ...] | None) -> Any:
        """Return the largest finite magnitudes along axes (None: all), which stay with size 1."""
        import numpy

        magnitudes = numpy.where(numpy.isfinite(value), abs(value), value.dtype.type(0))
        return magnitudes.max(axis=axes, keepdims=True, initial=0)

    def at_least(self, value: Any, least: float) -> Any:
        """Return the values, the smaller ones replaced by `least`."""
        import numpy

        return numpy.maximum(value, value.dtype.type(least))

    def flat(self, value: Any) -> Any:
        """Return the elements along one axis."""
        return value.reshape((-1,))

    def float8(self, value: Any, name: str) -> Any:
        """Return the nearest numbers of an 8-bit floating point type, in the dtype of `value`."""
        raise NotReadableError(f"no {name} in this framework")

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


class _OfFramework(Arithmetic):
    def suits(self, value: Any) -> bool:
        return True


class _Torch(_OfFramework):
    learns = True

    def wide(self, value: Any) -> Any:
        return value if value.dtype.itemsize >= 4 else value.float()

    def like(self, value: Any, other: Any) -> Any:
        return value.to(other.dtype)

    def round(self, value: Any) -> Any:
        return value.round()

    def clip(self, value: Any, lowest: float, highest: float) -> Any:
        return value.clamp(lowest, highest)

    def largest(self, value: Any, axes: tuple[int, ...] | None) -> Any:
        magnitudes = value.detach().abs().nan_to_num(0.0, 0.0, 0.0)
        if not value.numel():
            return magnitudes.sum(axes or (), keepdim=True)
        return magnitudes.amax(axes or (), keepdim=True)

    def at_least(self, value: Any, least: float) -> Any:
        return value.clamp(min=least)

    def float8(self, value: Any, name: str) -> Any:
        import torch

        return value.to(getattr(torch, name)).to(value.dtype)

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


class _TensorFlow(_OfFramework):
    def wide(self, value: Any) -> Any:
        import tensorflow

        return value if value.dtype.size >= 4 else tensorflow.cast(value, tensorflow.float32)

    def like(self, value: Any, other: Any) -> Any:
        import tensorflow

        return tensorflow.cast(value, other.dtype)

    def round(self, value: Any) -> Any:
        import tensorflow

        return tensorflow.round(value)

    def clip(self, value: Any, lowest: float, highest: float) -> Any:
        import tensorflow

        return tensorflow.clip_by_value(value, lowest, highest)

    def largest(self, value: Any, axes: tuple[int, ...] | None) -> Any:
        import tensorflow

        magnitudes = tensorflow.abs(value)
        finite = tensorflow.where(
            tensorflow.math.is_finite(magnitudes), magnitudes, tensorflow.zeros_like(magnitudes)
        )
        # The maximum of nothing is the lowest number.
        return self.at_least(tensorflow.reduce_max(finite, axis=axes, keepdims=True), 0.0)

    def flat(self, value: Any) -> Any:
        import tensorflow

        return tensorflow.reshape(value, (-1,))

    def at_least(self, value: Any, least: float) -> Any:
        import tensorflow

        return tensorflow.maximum(value, tensorflow.cast(least, value.dtype))

    def float8(self, value: Any, name: str) -> Any:
        import tensorflow

        narrow = getattr(tensorflow.dtypes.experimental, name)
        return tensorflow.cast(tensorflow.cast(value, narrow), value.dtype)

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


class _Jax(_OfFramework):
    def largest(self, value: Any, axes: tuple[int, ...] | None) -> Any:
        import jax.numpy

        magnitudes = jax.numpy.nan_to_num(abs(value), nan=0.0, posinf=0.0)
        return magnitudes.max(axis=axes, keepdims=True, initial=0)

    def wide(self, value: Any) -> Any:
        import jax.numpy

        return value if value.dtype.itemsize >= 4 else value.astype(jax.numpy.float32)

    def round(self, value: Any) -> Any:
        import jax.numpy

        return jax.numpy.round(value)

    def clip(self, value: Any, lowest: float, highest: float) -> Any:
        import jax.numpy

        return jax.numpy.clip(value, lowest, highest)

    def at_least(self, value: Any, least: float) -> Any:
        import jax.numpy

        return jax.numpy.maximum(value, least)

    def float8(self, value: Any, name: str) -> Any:
        import jax.numpy

        return value.astype(getattr(jax.numpy, name)).astype(value.dtype)

    def where(self, mask: Any, new: Any, old: Any) -> Any:
        import jax.numpy

        return jax.numpy.where(mask, new, old)

    def zeros(self, value: Any) -> Any:
        import jax.numpy

        return jax.numpy.zeros_like(value)


class _MXNet(_OfFramework):
    def largest(self, value: Any, axes: tuple[int, ...] | None) -> Any:
        # What is not finite stays: methods of its arrays cannot pick elements.
        return value.abs().max(axis=axes or (), keepdims=True)

    def wide(self, value: Any) -> Any:
        import numpy

        return value if numpy.dtype(value.dtype).itemsize >= 4 else value.astype(numpy.float32)

    def round(self, value: Any) -> Any:
        # Its own functions round halves up or down, and not to even.
        above = (value + 0.5).floor()
        return above - (above - value == 0.5) * (above / 2 != (above / 2).floor())

    def clip(self, value: Any, lowest: float, highest: float) -> Any:
        return value.clip(lowest, highest)

    def at_least(self, value: Any, least: float) -> Any:
        return value.clip(least, float("inf"))


def _rule(arithmetic: Arithmetic) -> Any:
    def rule(context: OpContext) -> None:
        context[ARITHMETIC] = arithmetic

    return rule


#: Rules for a `MappingTool`.
RULES = [
    ["*", _rule(Arithmetic())],
    ["jax", _rule(_Jax())],
    ["mxnet", _rule(_MXNet())],
    ["tensorflow", _rule(_TensorFlow())],
    ["pytorch", _rule(_Torch())],
]
