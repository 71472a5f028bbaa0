"""`Facts`: the interface by which a driver describes its framework's tensors to tools.

Owns the methods and their defaults. Tools do not inspect values themselves. Neither a framework nor
NumPy is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

__all__ = ["DENSE", "SYMBOLIC", "Facts", "NotReadableError", "Storage"]

#: The layout of a tensor with one shape, each element of which can be read.
DENSE = "dense"
#: The layout of a placeholder for a dense tensor, which has values only when the program runs.
SYMBOLIC = "symbolic"


class NotReadableError(Exception):
    """A fact about a tensor is not available; the message says why, in a few words."""


class Storage(NamedTuple):
    """The memory of a tensor.

    Attributes:
        key: Identifies it among the memory that is in use.
        nbytes: Its size in bytes, as it is allocated.
        holder: An object that lives as long as the memory does. If there are several, the memory
            is free when the last one is gone. It can be referred to weakly.
    """

    key: Hashable
    nbytes: int
    holder: Any


class Facts:
    """A driver's facts about the values at the positions of its operators.

    A driver makes a subclass and sets an instance of it as the attribute ``facts`` of its
    attachment. `is_tensor`, `dtype` and `shape` are required. Each other method serves some tools;
    if a driver keeps its default, these tools say so in their results.

    Tools keep the instance, so it must not refer to a session or a tensor. A method must not raise
    for a value that `is_tensor` accepted, unless it says so here, and must not compute anything
    that the program could notice. It may be called inside a routine, from any thread.

    Attributes:
        channels_first: Whether images have their channels on the second axis, where nothing else is
            known of the layout. Otherwise they are on the last axis.
    """

    channels_first = False

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, and for a value that the framework accepts as one."""
        raise NotImplementedError

    def is_own(self, tensor: Any) -> bool:
        """Return True if an operator or the framework made a tensor, False for other values that
        the framework accepts as one, such as a NumPy array.
        """
        return True

    def constant(self, value: Any) -> str | None:
        """Return a constant of the framework, such as a dtype or a device, as text; else None."""
        return None

    def dtype(self, tensor: Any) -> str:
        """Return the name of its dtype, without that of the framework: ``float32``."""
        raise NotImplementedError

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        """Return its shape, with None for an unknown dimension; None if the rank is unknown."""
        raise NotImplementedError

    def device(self, tensor: Any) -> str:
        """Return the device that it is on: ``cpu``, or another name such as ``cuda:0``."""
        return "cpu"

    def layout(self, tensor: Any) -> str:
        """Return `DENSE`, `SYMBOLIC`, or another layout in one or two words, such as ``sparse``."""
        return DENSE

    def stored(self, tensor: Any) -> int | None:
        """Return how many elements a sparse tensor stores; None if it stores all of its shape."""
        return None

    def nbytes(self, tensor: Any) -> int | None:
        """Return the total size of its elements in bytes; None if unknown."""
        return None

    def storage(self, tensor: Any) -> Storage | None:
        """Return the memory that it uses; None if it uses none.

        Raises:
            NotReadableError: The framework does not report it.
        """
        raise NotReadableError("its driver does not report where tensors lie in memory")

    def users(self, tensor: Any) -> int | None:
        """Return how many objects, such as tensors, keep its memory alive; None if unknown."""
        return None

    def values(self, tensor: Any) -> Any:
        """Return a copy of its values in main memory, as a NumPy array or a form of one.

        If NumPy does not have the dtype (``bfloat16``, ``float8_e4m3fn``), the array holds the bits
        as unsigned integers.

        Raises:
            NotReadableError: It does not have values, or they do not fit into one array.
        """
        raise NotReadableError("its driver does not read values")

    def view(self, tensor: Any) -> Any:
        """Return the same as `values`, but share the memory where this is possible.

        The array must not be written, nor kept for longer than the routine runs.

        Raises:
            NotReadableError: As for `values`.
        """
        return self.values(tensor)

    def tensor(self, values: Any, like: Any) -> Any:
        """Return a NumPy array in a form that operators of the framework combine with `like`.

        The default returns the array, which many frameworks accept.

        Args:
            values: The array, or a number.
            like: A tensor, or a gradient, with the device that the result must have.
        """
        return values

    def cast(self, values: Any, like: Any) -> Any:
        """Return a NumPy array as `tensor` does, with the dtype of `like`, which may be one that
        NumPy does not have.

        The default converts to the array's own dtype of that name.
        """
        return self.tensor(values.astype(self.dtype(like)), like)

    def restore(self, values: Any, like: Any) -> Any:
        """Return an array in the form of `values` as a tensor like another one.

        It has that one's dtype, device and layout. An array of bits becomes the numbers that they
        encode.
        """
        return self.cast(values, like)

    def update(self, parameter: Any, edit: Callable[[Any], Any]) -> None:
        """Write ``edit(values)`` into a parameter, in place and outside of all gradients.

        Args:
            parameter: What `Weight.parameter` returns.
            edit: Receives its values as a tensor, and returns their replacement.

        Raises:
            NotReadableError: Parameters of this framework cannot be written in place.
        """
        raise NotReadableError("its driver does not write parameters in place")

    def version(self, tensor: Any) -> int | None:
        """Return a number that grows with each write to it; None if writes are not counted."""
        return None

    def base(self, tensor: Any) -> Any:
        """Return the tensor of which it is a view, or itself."""
        return tensor

    def is_parameter(self, tensor: Any) -> bool:
        """Return True if the framework marks it as a parameter of a model."""
        return False

    def wants_gradient(self, tensor: Any) -> bool:
        """Return True if no operator made it and it gets a gradient."""
        return False
