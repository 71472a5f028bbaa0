"""The accounts of operators and threads, of which those of single steps can be left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from amanda_core import OpContext
from amanda_tools.kit.operators.tool import is_eager
from amanda_tools.kit.tensors.types import dtype_of
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.latency.intervals import Stack
from amanda_tools.latency.times import Samples, ThreadTime, TimedOp

__all__ = ["Account", "Op", "Thread"]


class Account(NamedTuple):
    """The accounts of a step, by its number, or of what came before one, by the negative number."""

    step: int
    between: dict[str, int]
    busy: int
    total: int


class Op:
    """One operator, or one backward operator of it.

    Attributes:
        facts: Its account.
        number: Its number, in the order of analysis.
        closed: Key of an account that is kept -> the account and its samples.
    """

    def __init__(self, context: OpContext, number: int) -> None:
        facts = TimedOp.of(context, waits="wait" in context and not context.is_backward())
        self.facts, self.tensors, self.number = facts, facts_of(context), number
        if held := context.get("operators", ()):
            facts.operators = [one.name for one in held]
            # What the kernel computes, as the common types of the operators.
            facts.word = " + ".join(dict.fromkeys(one["type"] or one.op_type for one in held))
        self.is_graph = not is_eager(facts.namespace)
        #: The positions of the results for which the end of an execution waits; None for all.
        ahead = self.tensors.runs_ahead and not self.is_graph
        self.results: list[int] | None = None if ahead else []
        self.is_torch = facts.namespace.startswith("pytorch/")
        #: None while backward accumulates a gradient, which counts for the previous module.
        self.module = facts.module if facts.phase == "forward" or facts.forward else None
        self.device: str | None = None
        self.samples = Samples()
        self.closed: dict[int, tuple[TimedOp, Samples]] = {}

    def close(self, key: int) -> None:
        """Begin a new account."""
        if self.facts.calls or self.facts.unfinished:
            self.closed[key], self.samples = (self.facts, self.samples), Samples()
            self.facts = self.facts.emptied()

    def summary(self, keys: Sequence[int]) -> TimedOp:
        """Return a copy of the account, with those that were closed under these keys."""
        found, samples = replace(self.facts), Samples()
        closed = [self.closed[key] for key in keys if key in self.closed]
        for _, earlier in closed:
            samples.extend(earlier.chosen)
        samples.extend(self.samples.chosen)
        for account, _ in reversed(closed):
            found.merge(account)
        found.median, found.p95, found.spread = samples.quantiles()
        return found

    def awaited(self, values: Sequence[Any]) -> list[int]:
        """Return the positions of the values that a routine must take to be called at the right
        time.

        A graph calls a routine as soon as its values are there. A routine without values would be
        called long before the operator can run. A reference to a variable does not help, because it
        is there before the variable has a value.
        """
        if not self.is_graph:
            return []
        kinds = (dtype_of(self.tensors, value) for value in values)
        return [position for position, kind in enumerate(kinds) if "_ref" not in kind]

    def waits_unseen(self, op: Any, values: Sequence[Any]) -> bool:
        """Return True if a graph operator has to wait for something that none of its values depends
        on.

        A routine before the operator only waits for the values that it takes, and the handle of a
        variable is always there.

        Args:
            op: The framework's operator.
            values: Its inputs.
        """
        if not self.is_graph or not self.facts.namespace.startswith("tensorflow/"):
            return False
        handles = ("resource", "variant", "_ref")
        kinds = [dtype_of(self.tensors, value) or "resource" for value in values]
        told = any(not any(handle in kind for handle in handles) for kind in kinds)
        return not told and bool(getattr(op, "control_inputs", ()))


class Thread:
    """One thread on which operators run."""

    def __init__(self, name: str) -> None:
        self.stack: Stack[Op] = Stack()
        self.time = ThreadTime(name)
        #: Key of an account that is kept -> the account.
        self.closed: dict[int, ThreadTime] = {}

    def close(self, key: int) -> None:
        """Begin a new account."""
        self.closed[key], self.time = self.time, ThreadTime(self.time.name)

    def summary(self, keys: Sequence[int]) -> ThreadTime:
        """Return a copy of the account, with those that were closed under these keys."""
        found = replace(self.time)
        for account in (self.closed[key] for key in keys if key in self.closed):
            found.calls += account.calls
            found.self += account.self
        return found
