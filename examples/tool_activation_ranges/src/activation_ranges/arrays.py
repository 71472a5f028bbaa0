"""Conversion of any framework's values to NumPy arrays.

Everything that depends on a framework is here: how its tensors are read. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "NotNumbersError", "as_array", "leaves"]

Array = npt.NDArray[Any]


class NotNumbersError(ValueError):
    """Raised if a value has no numbers from which a range could be made; the message says why."""


def leaves(values: object) -> Iterator[object]:
    """Yield the values inside nested lists, without None."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from leaves(value)
    elif values is not None:
        yield values


def as_array(value: Any) -> Array:
    """Return the numbers of a tensor in main memory, as a view if the framework allows it.

    Returns:
        An array of any shape and of a real type; narrow types that NumPy lacks become float32.

    Raises:
        NotNumbersError: The value is not a tensor of real numbers, or cannot be read.
    """
    try:
        array = _read(value)
    except Exception as error:
        # Sparse, symbolic, without storage: each framework raises its own type of error.
        first = str(error).strip().splitlines()[0:1] or [type(error).__name__]
        raise NotNumbersError(f"{type(value).__name__} cannot be read: {first[0]}") from error
    if array.dtype.kind == "V" and array.dtype.name.startswith(("bfloat", "float")):
        # Types of ml_dtypes, which TensorFlow and JAX use.
        array = array.astype(np.float32)
    if array.dtype.kind not in "fiu":
        raise NotNumbersError(f"values of type {array.dtype} have no range")
    return array


def _read(value: Any) -> Array:
    if callable(getattr(value, "detach", None)):
        # PyTorch: detach from autograd and copy from the device.
        value = value.detach().cpu()
        try:
            return np.asarray(value.numpy())
        except TypeError:
            return np.asarray(value.float().numpy())  # bfloat16 and narrower types.
    data = getattr(value, "data", None)
    # Frameworks on NumPy keep an array in `data`; an array itself has a buffer there.
    return np.asarray(data if isinstance(data, np.ndarray) else value)
