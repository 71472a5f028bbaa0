"""Facts about JAX's arrays and tracers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from amanda_core.interface import (
    DENSE,
    SYMBOLIC,
    Arithmetic,
    Contraction,
    Facts,
    NotReadableError,
    Storage,
)
from amanda_driver_jax.arrays import concrete, mapped_axes
from amanda_driver_jax.contractions import contraction

__all__ = ["FACTS"]


class _JaxFacts(Facts):
    shares_memory = runs_ahead = True
    arithmetic = Arithmetic(jnp)

    def processes(self) -> int:
        return int(jax.process_count())

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, (jax.Array, np.ndarray, np.generic))

    def is_own(self, tensor: Any) -> bool:
        return isinstance(tensor, jax.Array)

    def constant(self, value: Any) -> str | None:
        return str(value) if type(value).__module__.partition(".")[0] in ("jax", "jaxlib") else None

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype)

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        return tuple(n if isinstance(n, int) else None for n in tensor.shape)

    def device(self, tensor: Any) -> str:
        if isinstance(tensor, Tracer) or not isinstance(tensor, jax.Array):
            return "cpu"
        devices = sorted(tensor.devices(), key=lambda device: device.id)
        first = devices[0]
        name = first.platform if first.platform == "cpu" else f"{first.platform}:{first.id}"
        return name if len(devices) == 1 else f"{name} and {len(devices) - 1} more"

    def contraction(self, context: Any) -> Contraction | None:
        return contraction(context)

    def batch_axes(self, tensor: Any) -> tuple[int, ...]:
        return mapped_axes(tensor)

    def layout(self, tensor: Any) -> str:
        return SYMBOLIC if isinstance(concrete(tensor), Tracer) else DENSE

    def nbytes(self, tensor: Any) -> int | None:
        return int(tensor.size) * int(tensor.dtype.itemsize)

    def storage(self, tensor: Any) -> Storage | None:
        # Scalars of NumPy are passed by value, and nothing tells when one is gone.
        if isinstance(tensor, (Tracer, np.generic)) or not self.nbytes(tensor):
            return None
        if not isinstance(tensor, jax.Array) or len(tensor.devices()) > 1:
            return Storage(id(tensor), self.nbytes(tensor) or 0, tensor)
        try:
            key = tensor.unsafe_buffer_pointer()
        except Exception as error:  # Random keys, donated buffers, and devices without pointers.
            raise NotReadableError(f"no address: {type(error).__name__}") from error
        return Storage(key, self.nbytes(tensor) or 0, tensor)

    def wait(self, tensors: Any) -> None:
        jax.block_until_ready(tensors)

    def cast(self, values: Any, like: Any) -> Any:
        return values.astype(like.dtype)

    def restore(self, values: Any, like: Any) -> Any:
        bits = like.dtype.kind not in "biufc"
        return values.view(like.dtype) if bits else self.cast(values, like)

    def values(self, tensor: Any) -> Any:
        return np.array(self.view(tensor))

    def view(self, tensor: Any) -> Any:
        tensor = concrete(tensor)
        try:
            array = np.asarray(tensor, order="C")
        except Exception as error:  # JAX raises various types for what has no values.
            raise NotReadableError(f"no values: {type(error).__name__}") from error
        if array.dtype.kind not in "biufc":  # ml_dtypes: bfloat16, float8, int4
            return array.view(f"uint{8 * array.dtype.itemsize}")
        return array


#: Shared by all sessions, as it has no state.
FACTS: Facts = _JaxFacts()
