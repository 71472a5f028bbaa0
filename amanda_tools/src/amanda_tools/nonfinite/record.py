"""Records of operators, their executions and the values in them, for `NonFinite`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_core import OpContext
from amanda_core.interface.facts import Facts
from amanda_core.runtime.weak import Ref, weakly
from amanda_tools.kit.operators.entries import OpFacts, key_of
from amanda_tools.kit.operators.tool import is_eager
from amanda_tools.kit.tensors.statistics import statistics_of
from amanda_tools.kit.tensors.values import NotReadableError, host, numbers
from amanda_tools.nonfinite.probe import Pending, probe_of
from amanda_tools.nonfinite.result import Looked, Origin

__all__ = [
    "Entered",
    "Execution",
    "Look",
    "Made",
    "Op",
    "Running",
    "describe_live",
    "union",
    "weak_reference",
]


class Op:
    """One operator or backward operator that is checked."""

    def __init__(self, context: OpContext, running: Running, of: str = "") -> None:
        holder = context if context.forward is None else context.forward
        self.facts = OpFacts.of(holder)
        self.key = key_of(context)
        self.probe = probe_of(context)
        self.of = of
        self.names = context.input_names if not of else ()
        self.allowed = False
        #: Whether its input is the gradient of a parameter, which has been reduced.
        self.is_reduction = False
        #: Of a backward operator, the forward operator, whose values it may have saved.
        self.forward: Op | None = None
        #: Bits of the values that it read or returned in this step, which its backward passes on.
        self.spoiled = 0
        kind = context.op_type
        inner = kind.startswith("__i") and kind.endswith("__")
        self.writes = not of and (
            (kind.endswith("_") and not kind.endswith("__")) or inner or kind == "__setitem__"
        )
        # AddN sums in an order that depends on which buffer is free. Holding one would change the
        # rounding.
        self.writes = self.writes or kind in ("AddN", "AccumulateNV2")
        self.reads_variable = kind in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
        self._eager = is_eager(context.namespace)
        #: Executions in progress: of all eager operators, or of this operator of a graph under 0.
        self._running: Running = running if self._eager else {}
        #: Outputs of executions whose inputs have not come yet: compiled programs call routines in
        #: any order.
        self._early: list[Sequence[Any]] = []

    def enter(self, entered: Entered) -> Sequence[Any] | None:
        """Start an execution; return its outputs if they came before, or None."""
        running = self._running.setdefault(threading.get_ident() if self._eager else 0, [])
        if running and self._eager and not self.of:
            # Only an exception in an earlier execution can have left one of the same operator.
            self._take(running)
        running.append(entered)
        return self._early.pop(0) if self._early else None

    def leave(self) -> Entered | None:
        """Return the inputs of the execution that ends, or None if its start was not seen."""
        running = self._running.get(threading.get_ident() if self._eager else 0, [])
        if not self._eager:
            # The executions of a graph end in the order of their start.
            return running.pop(0) if running else None
        if running and running[-1].op is self:
            return running.pop()
        entered = self._take(running)
        if entered is None and self.of:
            # A framework's workers may begin a backward operator in one thread and end it in
            # another.
            found = map(self._take, self._running.values())
            entered = next((one for one in found if one is not None), None)
        return entered

    def _take(self, running: list[Entered]) -> Entered | None:
        """Remove the last execution of this operator, and those inside it, which an exception
        left.
        """
        for index in reversed(range(len(running))):
            entered = running[index]
            if entered.op is self:
                del running[index:]
                return entered
        return None

    def held(self, inputs: Sequence[Any]) -> Any:
        """Return inputs as an execution in progress holds them."""
        return weakly(inputs) if self._eager and not self.of else inputs

    def keep(self, outputs: Sequence[Any]) -> bool:
        """Keep the outputs of an execution until its inputs come; return False if they cannot."""
        if not self._eager:
            self._early.append(outputs)
        return not self._eager

    @property
    def unmatched(self) -> int:
        """How many executions ended in this step and did not begin in it so far."""
        return len(self._early)

    def forget(self) -> None:
        """Drop what belongs to the step: executions that an exception left, and bits."""
        self._running.clear()
        self._early.clear()
        self.spoiled = 0

    def name_of(self, position: str) -> str:
        """Return the name of an input, with the path of the module that it may belong to."""
        first, _, rest = position.partition(".")
        names = self.names
        name = names[int(first)] if int(first) < len(names) else f"input {first}"
        name += f"[{rest}]" if rest else ""
        return f"{self.facts.module}.{name}" if self.facts.module else name


@dataclass(slots=True)
class Entered:
    """Inputs of an execution in progress, or the result of checking them.

    Inputs of an eager operator are as of `weakly`, since an operator that raises does not end. The
    caller holds them until it ends, but the framework may free gradients earlier.
    """

    op: Op
    inputs: Sequence[Any]
    looks: list[Look] | None
    waits: bool


#: Thread -> executions, of which each runs inside the one before it.
Running = dict[int, list[Entered]]


@dataclass
class Look:
    """Result of checking a value: its bits, or pending numbers."""

    position: str
    found: int | Pending
    origin: Origin | None
    tensor: Callable[[], Any]


@dataclass(frozen=True)
class Made:
    """Result of checking a tensor that an operator produced.

    Attributes:
        version: Version of the tensor when it was checked; None if unknown.
        found: Its bits, or pending numbers.
    """

    version: int | None
    found: int | Pending

    def is_still(self, version: int | None) -> bool:
        """Return True if a tensor with this version has not been written since."""
        return version is not None and version == self.version


@dataclass
class Execution:
    """One execution that has ended."""

    op: Op
    step: int
    inputs: list[Look]
    outputs: list[Look]


def union(looks: Sequence[Look]) -> int:
    """Return the union of the bits of several values, all of which are resolved."""
    bits = 0
    for look in looks:
        assert isinstance(look.found, int)
        bits |= look.found
    return bits


def weak_reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the tensor while it is alive, without keeping it alive."""
    try:
        return Ref(value)
    except TypeError:
        return lambda: None  # A number of Python or NumPy.


def describe_live(facts: Facts, looks: Sequence[Look]) -> list[Looked]:
    """Describe the tensors that are still alive and unchanged."""
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
            continue  # Written since.
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
