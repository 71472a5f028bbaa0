"""Tokens of tensors: numbers that identify handles of variables and watched tensors.

A tensor carries its own token, since finding it must cost no more than an attribute, also in C.
"""

from __future__ import annotations

import weakref
from typing import Any

from amanda_core.driver_kit import Labels

__all__ = ["TOKENS", "Tokens"]


class Tokens:
    """The tokens of this process: `TOKENS` is the only instance.

    A token identifies an eager tensor: the handle of a variable, or a tensor that a tape watches.
    The value that a read of a variable returns has the token of the variable. `of` gives a tensor
    its token, `find` returns the tensor of a token, and `release` removes all.
    """

    def __init__(self) -> None:
        self._labels = Labels()
        self._tensors: dict[int, weakref.ref[Any]] = {}

    def of(self, tensor: Any) -> int:
        """Return the token of an eager tensor, without its sign; the first call makes it.

        It is positive, and is never reused in this process.
        """
        return abs(self.signed(tensor))

    def signed(self, tensor: Any) -> int:
        """Return the token of an eager tensor; the first call makes it.

        It is negative if a tape watches the tensor and the tensor is not a variable's handle or
        value.
        """
        source = tensor._amanda_source
        if source.__class__ is int and source:
            return source
        token = self._labels.look_up(tensor)[0]
        for dead in self._labels.take_dead():
            self._tensors.pop(dead, None)
        self._tensors[token] = weakref.ref(tensor)
        tensor._amanda_source = token
        return token

    def find(self, token: int) -> Any:
        """Return the tensor of a token of either sign; None if the tensor has died."""
        return self._labels.tensor(abs(token))

    def release(self) -> None:
        """Remove the tokens from all live tensors."""
        # An exception may arrive at any line: what still has a token stays to be released. What the
        # garbage collector or another thread runs meanwhile may add tokens.
        for token, reference in list(self._tensors.items()):
            tensor = reference()
            if tensor is not None:
                vars(tensor).pop("_amanda_source", None)
            self._tensors.pop(token, None)


TOKENS = Tokens()
