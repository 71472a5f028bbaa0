"""`Facts`: what tools may ask of the tensors of a framework. Its driver answers.

Owns the questions and the answers for a driver that leaves one out. No tool finds out by itself
what a value is; no framework is imported here, nor NumPy.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

__all__ = ["DENSE", "SYMBOLIC", "Facts", "NotReadableError", "Storage"]

#: The layout of a tensor that has one shape and, at each place, an element that can be read.
DENSE = "dense"
#: The layout of a tensor that stands for such a one until the program runs.
SYMBOLIC = "symbolic"


class NotReadableError(Exception):
    """What was asked of a tensor cannot be said; the message says why, in a few words."""


class Storage(NamedTuple):
    """The memory of a tensor.

    Attributes:
        key: What tells it from other memory that is in use.
        nbytes: Its size in bytes, as it is allocated.
        holder: An object that lives as long as the memory does. If there are several, the memory
            is free when the last one is gone. It can be referred to weakly.
    """

    key: Hashable
    nbytes: int
    holder: Any


class Facts:
    """Answers of a driver about the values at the positions of its operators.

    A driver makes a subclass and sets an instance of it as the attribute ``facts`` of its
    attachment. `is_tensor`, `dtype` and `shape` are always needed; each other method serves some
    tools, which say so in their results where its default answers.

    The instance refers to no session and to no tensor, since tools keep it. A method reads
    nothing that may raise for a value that `is_tensor` accepted, computes nothing that the program
    could notice, and may be called inside a routine, from any thread.
    """

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, and for what the framework takes in place of one."""
        raise NotImplementedError

    def dtype(self, tensor: Any) -> str:
        """Return the name of the type of its elements, without the framework's: ``float32``."""
        raise NotImplementedError

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        """Return its dimensions: None for one that is not known; None if not even their number."""
        raise NotImplementedError

    def device(self, tensor: Any) -> str:
        """Return where it is: ``cpu``, or another word such as ``cuda:0``."""
        return "cpu"

    def layout(self, tensor: Any) -> str:
        """Return `DENSE`, `SYMBOLIC`, or a word or two for what else it is: ``sparse``."""
        return DENSE

    def stored(self, tensor: Any) -> int | None:
        """Return how many elements a sparse tensor holds; None if all that its shape says."""
        return None

    def nbytes(self, tensor: Any) -> int | None:
        """Return the size of its elements in bytes; None where that is not known."""
        return None

    def storage(self, tensor: Any) -> Storage | None:
        """Return the memory that it uses; None if it uses none.

        Raises:
            NotReadableError: The framework does not tell.
        """
        raise NotReadableError("its driver does not tell where tensors lie in memory")

    def values(self, tensor: Any) -> Any:
        """Return a copy of its values in main memory, as a NumPy array or what makes one.

        Where NumPy has no such dtype (``bfloat16``, ``float8_e4m3fn``), the array holds their bits
        as unsigned integers.

        Raises:
            NotReadableError: It has no values, or not in one array.
        """
        raise NotReadableError("its driver does not read values")

    def version(self, tensor: Any) -> int | None:
        """Return a number that grows with each write to it; None where nobody counts."""
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
