"""What `NonFinite` keeps of operators, of their executions, and of the values in them.

Owns what an operator is to it and how closely a value is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_core import OpContext
from amanda_core.facts import Facts
from amanda_core.weak import Ref
from amanda_tools.nonfinite.probe import Pending, probe_of
from amanda_tools.nonfinite.result import Looked, Origin
from amanda_tools.operators.entries import OpFacts, key_of
from amanda_tools.operators.tool import is_eager
from amanda_tools.tensors.statistics import statistics_of
from amanda_tools.tensors.values import NotReadableError, host, numbers

__all__ = ["Entered", "Execution", "Look", "Made", "Op", "looked", "union", "weak"]


class Op:
    """One operator or backward operator, as it is looked at."""

    def __init__(self, context: OpContext, of: str = "") -> None:
        holder = context if context.forward is None else context.forward
        self.facts = OpFacts.of(holder)
        self.key = key_of(context)
        self.probe = probe_of(context)
        self.of = of
        self.names = context.input_names if not of else ()
        self.allowed = False
        kind = context.op_type
        inner = kind.startswith("__i") and kind.endswith("__")
        self.writes = not of and (
            (kind.endswith("_") and not kind.endswith("__")) or inner or kind == "__setitem__"
        )
        # A sum over many is taken in an order that depends on which of their buffers is free: who
        # held one would change how it rounds.
        self.writes = self.writes or kind in ("AddN", "AccumulateNV2")
        self.reads_variable = kind in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
        self._eager = is_eager(context.namespace)
        #: Thread -> the executions that it is in; graphs have all of theirs at 0.
        self._entered: dict[int, list[Entered]] = {}

    def enter(self, entered: Entered) -> None:
        """An execution begins."""
        self._entered.setdefault(self._thread, []).append(entered)

    def leave(self) -> Entered | None:
        """Return what the execution that ends began with, None if it is not known."""
        waiting = self._entered.get(self._thread)
        if not waiting:
            return None
        # Those of a thread lie in one another; of a graph's, run at a time, the first is the next.
        return waiting.pop() if self._eager else waiting.pop(0)

    def forget(self) -> None:
        """Let go of executions that have not ended: they were left by an exception."""
        self._entered.clear()

    @property
    def _thread(self) -> int:
        return threading.get_ident() if self._eager else 0

    def name_of(self, position: str) -> str:
        """Name of an input, with the path of the module that it may belong to."""
        first, _, rest = position.partition(".")
        names = self.names
        name = names[int(first)] if int(first) < len(names) else f"input {first}"
        name += f"[{rest}]" if rest else ""
        return f"{self.facts.module}.{name}" if self.facts.module else name


@dataclass
class Entered:
    """What one execution began with: its inputs, or what they looked like."""

    inputs: Sequence[Any]
    looks: list[Look] | None
    waits: bool


@dataclass
class Look:
    """What a value looked like: its bits, or the numbers that they will be made of."""

    position: str
    found: int | Pending
    origin: Origin | None
    tensor: Callable[[], Any]


@dataclass(frozen=True)
class Made:
    """A tensor that an operator made, and what it looked like.

    Attributes:
        version: How often it was written then, None where that is not known.
        found: Its bits, or the numbers that they will be made of.
    """

    version: int | None
    found: int | Pending

    def is_still(self, version: int | None) -> bool:
        """Return True if a tensor of this version now is as it was."""
        return version is not None and version == self.version


@dataclass
class Execution:
    """One execution."""

    op: Op
    step: int
    inputs: list[Look]
    outputs: list[Look]


def union(looks: Sequence[Look]) -> int:
    """The bits of several values, whose numbers have come."""
    bits = 0
    for look in looks:
        assert isinstance(look.found, int)
        bits |= look.found
    return bits


def weak(value: Any) -> Callable[[], Any]:
    """Return a function that returns a tensor while it lives, without keeping it alive."""
    try:
        return Ref(value)
    except TypeError:
        return lambda: None  # A number, of Python's or NumPy's.


def looked(facts: Facts, looks: Sequence[Look]) -> list[Looked]:
    """The tensors looked at closely: those that still live and are what they were."""
    import numpy

    found = []
    for look in looks:
        tensor = look.tensor()
        if tensor is None:
            continue
        try:
            values = host(facts, tensor)
        except NotReadableError:
            continue
        wrong = numpy.argwhere(~numpy.isfinite(numbers(values.array, values.dtype)))
        if bool(look.found) != bool(len(wrong)):
            continue  # Written meanwhile.
        found.append(
            Looked(
                look.position,
                values.dtype,
                list(values.array.shape),
                statistics_of(values),
                wrong[0].tolist() if len(wrong) else None,
            )
        )
    return found
