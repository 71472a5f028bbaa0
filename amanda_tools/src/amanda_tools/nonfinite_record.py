"""What `NonFinite` keeps of operators, of their executions, and of the values in them.

Owns what an operator is to it and how closely a value is looked at.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_core import OpContext
from amanda_tools.facts import OpFacts, key_of
from amanda_tools.nonfinite_probe import Pending
from amanda_tools.nonfinite_result import Looked, Origin
from amanda_tools.statistics import statistics_of
from amanda_tools.tensors import NotReadableError, host, numbers

__all__ = ["Entered", "Execution", "Look", "Op", "looked", "union", "weak"]


class Op:
    """One operator or backward operator, as it is looked at."""

    def __init__(self, context: OpContext, of: str = "") -> None:
        holder = context if context.forward is None else context.forward
        self.facts = OpFacts.of(holder)
        self.key = key_of(context)
        self.of = of
        self.names = context.input_names if not of else ()
        self.allowed = False
        kind = context.op_type
        inner = kind.startswith("__i") and kind.endswith("__")
        self.writes = not of and (
            (kind.endswith("_") and not kind.endswith("__")) or inner or kind == "__setitem__"
        )
        self.reads_variable = kind in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
        self._eager = "/eager" in context.namespace
        #: Thread -> the execution that it is in.
        self.entered: dict[int, Entered] = {}

    @property
    def thread(self) -> int:
        """The thread of an execution; graphs have one at a time, on any thread."""
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
    """What gives a tensor as long as it lives: nobody keeps it only to be looked at closely."""
    return (lambda: None) if isinstance(value, float) else weakref.ref(value)


def looked(looks: Sequence[Look]) -> list[Looked]:
    """The tensors looked at closely: those that still live and are what they were."""
    import numpy

    found = []
    for look in looks:
        tensor = look.tensor()
        if tensor is None:
            continue
        try:
            values = host(tensor)
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
