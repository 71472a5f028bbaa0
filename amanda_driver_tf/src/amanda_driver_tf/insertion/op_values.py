"""The values that forward ops ran on, and access to forward programs in other bodies.

Owns the terms that rewriting, gradients and links share. It makes no decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from amanda_core.driver_kit import Step
from amanda_driver_tf.graphs.body import Value
from amanda_driver_tf.graphs.records import is_symbolic
from amanda_driver_tf.insertion.nodes import Flat
from amanda_driver_tf.tensorflow_internals.modules import ops

__all__ = [
    "Differentiated",
    "ForwardProgram",
    "Key",
    "OpValues",
    "arguments_of",
    "is_discrete",
    "key_of",
    "source_of",
    "upstream_of",
]

#: A tensor of a graph: its op (by identity) and its index.
Key = tuple[int, int]


def key_of(tensor: Any) -> Key:
    """Return a key that identifies a tensor of a graph."""
    return id(tensor.op), tensor.value_index


def arguments_of(graph: Any) -> dict[int, Key]:
    """Map the id of each tensor that a function captured to its argument inside the function."""
    captures = getattr(graph, "captures", ())
    return {ops.tensor_id(outer): key_of(inner) for outer, inner in captures}


def upstream_of(tensors: Iterable[Any]) -> set[Key]:
    """Return the keys of `tensors` and of all tensors that gradients of `tensors` may reach."""
    waiting = [tensor for tensor in tensors if is_symbolic(tensor)]
    found: set[Key] = set()
    while waiting:
        tensor = waiting.pop()
        if key_of(tensor) not in found:
            found.add(key_of(tensor))
            waiting += [read for read in tensor.op.inputs if not is_discrete(read.dtype)]
    return found


def is_discrete(dtype: Any) -> bool:
    """Return True if tensors of a dtype have no gradient. Handles of variables have one."""
    return bool(dtype.is_integer or dtype.is_bool or dtype.name == "string")


class Differentiated(NamedTuple):
    """A step that is differentiated as it is written.

    Attributes:
        flat: The function it computes.
        given: Its inputs.
        selected: Positions of these inputs among the inputs or outputs of the op.
        step: The step.
    """

    flat: Flat
    given: list[Value]
    selected: list[int]
    step: Step


class OpValues:
    """The values that one forward op ran on and produced, which its gradient's ops must read.

    Attributes:
        inputs: Its inputs, as edited.
        outputs: Its outputs, before any edit.
        before: Differentiated steps before the op.
        after: Differentiated steps after the op.
        replacement: Its replacement, if it was replaced.
    """

    __slots__ = ("after", "before", "inputs", "op", "outputs", "replacement")

    def __init__(self, op: Any, inputs: list[Value], outputs: list[Value]) -> None:
        self.op = op
        self.inputs, self.outputs = inputs, outputs
        self.before: list[Differentiated] = []
        self.after: list[Differentiated] = []
        self.replacement: Differentiated | None = None


class ForwardProgram:
    """Access to a forward program that is in another body. This base class knows of none.

    Attributes:
        is_looped: Whether both bodies are those of loops.
    """

    is_looped = False

    def tensor(self, value: Value) -> Any:
        """Return the forward tensor that a value of this body carries, or None."""
        return None

    def seen(self, op: Any) -> OpValues | None:
        """Return the values of an op of the forward body, or None if the op is not there."""
        return None

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Return True if this body already receives the version `wanted` of a forward tensor."""
        return True

    def refuse_second(self, body: Any) -> None:
        """Refuse to differentiate gradients in `body` that other ops compute now."""

    def bring(self, value: Value) -> Value:
        """Make a value of the forward body available in this body."""
        raise NotImplementedError


def source_of(tensor: Any) -> Any:
    """Return the tensor that a chain of `Identity` ops begins with."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor
