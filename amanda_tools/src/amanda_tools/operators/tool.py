"""`OperatorTool`: what all tools share that keep an account of each operator.

Owns which operators such a tool looks at, its accounts, its lock and its clock, and what it says of
namespaces whose driver does not give what it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from amanda_core import OpContext, Tool
from amanda_tools.operators.clock import Clock
from amanda_tools.operators.entries import key_of

__all__ = ["OperatorTool", "is_eager"]

A = TypeVar("A")

#: Capability -> why a tool does nothing without it.
_WITHOUT = {
    "facts": "its driver does not tell what tensors are",
    "ordered": "routines do not run there when their operator does",
}


class OperatorTool(Tool, Generic[A]):
    """A tool that keeps an account of each operator.

    A subclass asks `is_wanted` before it looks at a context, and gets its account by `account_of`.

    Args:
        everything: Whether to look at what is not the model's as well, such as an optimizer.

    Attributes:
        needs: Capabilities without which the tool can do nothing.
    """

    needs: ClassVar[tuple[str, ...]] = ("facts",)

    def __init__(self, everything: bool = False) -> None:
        super().__init__()
        self.everything = everything
        self._ops: dict[tuple[object, ...], A] = {}
        #: What is not seen, and why, each once.
        self._notes: dict[str, None] = {}
        # Graphs run routines on threads of the framework's.
        self._lock = threading.RLock()
        self._clock = Clock()

    def is_wanted(self, context: OpContext) -> bool:
        """Return True if the tool is to look at an operator; note it if it cannot."""
        why = self.why_unsupported(context)
        if why is not None:
            self._notes.setdefault(f"not supported on {context.namespace}: {why}")
            return False
        return self.everything or context.zone == "model"

    def why_unsupported(self, context: OpContext) -> str | None:
        """Return why the tool can do nothing in the namespace of a context, None if it can."""
        for capability in self.needs:
            given = context.facts if capability == "facts" else context.supports(capability)
            if not given:
                return _WITHOUT[capability]
        return None

    def account_of(self, context: OpContext, make: Callable[[], A]) -> A:
        """Return the account of an operator, made when it is met for the first time."""
        key = key_of(context)
        with self._lock:
            account = self._ops.get(key)
            if account is None:
                account = self._ops[key] = make()
            return account

    def known(self, context: OpContext) -> A | None:
        """Return the account of an operator, None if it has none."""
        return self._ops.get(key_of(context))


def is_eager(namespace: str) -> bool:
    """Return True for a mode in which operators run one by one, as the program calls them."""
    return "/eager" in namespace
