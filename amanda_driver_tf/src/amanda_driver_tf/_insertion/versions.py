"""Versions: what one forward op saw, and access to forward programs that stand elsewhere.

Owns the vocabulary that weaving, gradients and links share; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from amanda_core.plan import Step
from amanda_driver_tf._graphs.body import Value
from amanda_driver_tf._graphs.records import is_symbolic
from amanda_driver_tf._insertion.nodes import Flat
from amanda_driver_tf._tensorflow_internals.modules import ops

__all__ = [
    "Differentiated",
    "Foreign",
    "Key",
    "Seen",
    "arguments_of",
    "behind",
    "is_discrete",
    "key_of",
    "source_of",
]

#: A tensor of a graph: its op (by identity) and its index.
Key = tuple[int, int]


def key_of(tensor: Any) -> Key:
    """Return what tells the tensors of graphs apart."""
    return id(tensor.op), tensor.value_index


def arguments_of(graph: Any) -> dict[int, Key]:
    """Number of each tensor that a function captured -> the argument that it is inside."""
    captures = getattr(graph, "captures", ())
    return {ops.tensor_id(outer): key_of(inner) for outer, inner in captures}


def behind(tensors: Iterable[Any]) -> set[Key]:
    """The tensors of a graph that others may have gradients for, and these."""
    waiting = [tensor for tensor in tensors if is_symbolic(tensor)]
    found: set[Key] = set()
    while waiting:
        tensor = waiting.pop()
        if key_of(tensor) not in found:
            found.add(key_of(tensor))
            waiting += [read for read in tensor.op.inputs if not is_discrete(read.dtype)]
    return found


def is_discrete(dtype: Any) -> bool:
    """Return True if tensors of a dtype have no gradients; handles of variables have some."""
    return bool(dtype.is_integer or dtype.is_bool or dtype.name == "string")


class Differentiated(NamedTuple):
    """A step that is differentiated as it is written.

    Attributes:
        flat: What it computes.
        given: What it is given.
        selected: Positions of these among the inputs or outputs of the op.
        step: The step.
    """

    flat: Flat
    given: list[Value]
    selected: list[int]
    step: Step


class Seen:
    """What one forward op saw and made: the values that its gradient's ops are to read.

    Attributes:
        inputs: Its inputs as it ran on them.
        outputs: Its outputs before anything was inserted behind it.
        before: Differentiated steps before the op.
        after: Those after it.
        replacement: What it was replaced by.
    """

    __slots__ = ("after", "before", "inputs", "op", "outputs", "replacement")

    def __init__(self, op: Any, inputs: list[Value], outputs: list[Value]) -> None:
        self.op = op
        self.inputs, self.outputs = inputs, outputs
        self.before: list[Differentiated] = []
        self.after: list[Differentiated] = []
        self.replacement: Differentiated | None = None


class Foreign:
    """Access to a forward program that stands in another body; the base knows none.

    Attributes:
        is_looped: Whether these are the bodies of loops.
    """

    is_looped = False

    def tensor(self, value: Value) -> Any:
        """The forward tensor that a value of this body carries, or None."""
        return None

    def seen(self, op: Any) -> Seen | None:
        """Return what an op of the forward body saw and made, or None if it is not there."""
        return None

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Return True if the wanted version of a forward tensor is the one this body is given."""
        return True

    def refuse_second(self, body: Any) -> None:
        """Refuse that `body` differentiates gradients of it that other ops compute by now."""

    def bring(self, value: Value) -> Value:
        """A value of the forward body as a value of this one."""
        raise NotImplementedError


def source_of(tensor: Any) -> Any:
    """The tensor behind `Identity` ops."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor
