"""`OperatorTool`: base of the tools that keep an account of each operator.

Decides which operators a tool looks at, and reports namespaces whose driver lacks a capability that
the tool needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from amanda_core import OpContext, Tool
from amanda_core.engine.session import COMPILED_CALL, COMPILED_KERNEL
from amanda_tools.kit.operators.clock import Clock
from amanda_tools.kit.operators.entries import key_of

__all__ = ["OperatorTool", "is_eager", "runs_in_order"]

A = TypeVar("A")

#: Capability -> reason why a tool cannot work without it.
_WITHOUT = {
    "facts": "its driver does not tell what tensors are",
    "ordered": "routines do not run there when their operator does",
}


class OperatorTool(Tool, Generic[A]):
    """A tool that keeps an account of each operator.

    A subclass calls `is_wanted` before it looks at a context, and gets the operator's account from
    `account_of`.

    Args:
        everything: Include operators outside the model, such as those of an optimizer.

    Attributes:
        needs: Capabilities of the driver without which the tool cannot work.

    >>> class Calls(OperatorTool[list[int]]):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.add_inst_for_op(self.analyse)
    ...
    ...     def analyse(self, context):
    ...         if self.is_wanted(context):
    ...             calls = self.account_of(context, lambda: [0])
    ...             context.insert_before_op(self.count, inputs=[], observe=True, calls=calls)
    ...
    ...     def count(self, calls):
    ...         calls[0] += 1
    >>> Calls().notes
    []
    """

    needs: ClassVar[tuple[str, ...]] = ("facts",)

    def __init__(self, everything: bool = False) -> None:
        super().__init__()
        self.everything = everything
        self._ops: dict[tuple[object, ...], A] = {}
        #: Notes on operators that are not observed; a dict, so that each appears once.
        self._notes: dict[str, None] = {}
        # In graphs, routines run on the framework's threads.
        self._lock = threading.RLock()
        self._clock = Clock()

    @property
    def notes(self) -> list[str]:
        """Return what is not observed, and why."""
        return list(self._notes)

    def is_wanted(self, context: OpContext) -> bool:
        """Return True if the tool should look at this operator; add a note if it cannot."""
        why = self.why_unsupported(context)
        if why is not None:
            self._notes.setdefault(f"not supported on {context.namespace}: {why}")
            return False
        if context.get("not_compiled"):
            self._notes.setdefault(
                "compiled callables ran eagerly: these are the operators of the eager program"
            )
        elif context.op_type in (COMPILED_CALL, COMPILED_KERNEL):
            if context.namespace.endswith("/compiled"):
                self._notes.setdefault(
                    "compiled callables: these are the kernels that the compiler made, and the "
                    "operators that each computes"
                )
        elif context.namespace.endswith("/compiled"):
            self._notes.setdefault(
                "compiled callables: these are the operators that were traced, before the compiler "
                "fuses them"
            )
        return self.everything or context.zone == "model"

    def why_unsupported(self, context: OpContext) -> str | None:
        """Return why the tool cannot work in the namespace of this context, or None if it can."""
        for capability in self.needs:
            given = context.facts if capability == "facts" else context.supports(capability)
            if not given:
                return _WITHOUT[capability]
        return None

    def account_of(self, context: OpContext, make: Callable[[], A]) -> A:
        """Return the account of an operator; call `make` to create it on first use."""
        key = key_of(context)
        with self._lock:
            account = self._ops.get(key)
            if account is None:
                account = self._ops[key] = make()
            return account

    @property
    def accounts(self) -> list[A]:
        """Return the accounts of all operators, in the order in which they were created."""
        with self._lock:
            return list(self._ops.values())

    def known(self, context: OpContext) -> A | None:
        """Return the account of an operator, or None if it has none."""
        return self._ops.get(key_of(context))


def is_eager(namespace: str) -> bool:
    """Return True if operators run one by one in this namespace, as the program calls them.

    >>> is_eager("pytorch/2.9/eager"), is_eager("tensorflow/2.21/graph")
    (True, False)
    """
    return "/eager" in namespace


def runs_in_order(namespace: str) -> bool:
    """Return True if routines run in this namespace where the program calls the operators.

    >>> runs_in_order("pytorch/2.9/compiled"), runs_in_order("tensorflow/2.21/graph")
    (True, False)
    """
    return is_eager(namespace) or namespace.endswith("/compiled")
