"""The numbers of a value of any framework, as a NumPy array.

Owns what is known of frameworks here: how their tensors are read. It imports none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "NotNumbersError", "as_array", "leaves"]

Array = npt.NDArray[Any]


class NotNumbersError(ValueError):
    """A value has no numbers that a range could be made of; the message says why."""


def leaves(values: object) -> Iterator[object]:
    """The values inside lists, lists of lists and so on; None is left out."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from leaves(value)
    elif values is not None:
        yield values


def as_array(value: Any) -> Array:
    """The numbers of a tensor, in memory of the host: a view where the framework allows it.

    Returns:
        An array of any shape and of a real type; half-width types that NumPy lacks as float32.

    Raises:
        NotNumbersError: It is no tensor of real numbers, or its numbers cannot be read.
    """
    try:
        array = _read(value)
    except Exception as error:
        # Sparse, symbolic, without storage: each framework says so in its own way.
        first = str(error).strip().splitlines()[0:1] or [type(error).__name__]
        raise NotNumbersError(f"{type(value).__name__} cannot be read: {first[0]}") from error
    if array.dtype.kind == "V" and array.dtype.name.startswith(("bfloat", "float")):
        # The types of ml_dtypes, which TensorFlow and JAX use.
        array = array.astype(np.float32)
    if array.dtype.kind not in "fiu":
        raise NotNumbersError(f"values of type {array.dtype} have no range")
    return array


def _read(value: Any) -> Array:
    if callable(getattr(value, "detach", None)):
        # PyTorch: behind autograd, and maybe in the memory of a device.
        value = value.detach().cpu()
        try:
            return np.asarray(value.numpy())
        except TypeError:
            return np.asarray(value.float().numpy())  # bfloat16 and narrower.
    data = getattr(value, "data", None)
    # Frameworks on NumPy keep an array there; arrays themselves keep a buffer.
    return np.asarray(data if isinstance(data, np.ndarray) else value)
