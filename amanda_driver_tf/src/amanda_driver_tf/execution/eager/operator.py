"""`EagerOp`: the raw operator of an eager context, which looks like a `tf.Operation`.

Owns its attributes in the form that `tf.Operation.get_attr` returns. It holds no tensor after its
execution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amanda_core.interface import StaleContextError
from amanda_driver_tf.tensorflow_internals.modules import backprop

__all__ = ["Attributes", "EagerOp"]


class Attributes(Mapping[str, Any]):
    """Attributes of an op by name, converted when they are read.

    Args:
        op_type: Type of the op.
        flat: Names and values in alternation, as TensorFlow passes them, or None.
    """

    __slots__ = ("_op_type", "_raw")

    def __init__(self, op_type: str, flat: Sequence[Any] | None) -> None:
        self._op_type = op_type
        flat = flat or ()
        self._raw = dict(zip(flat[::2], flat[1::2], strict=False))

    def __getitem__(self, name: str) -> Any:
        value = self._raw[name]
        kind = backprop.op_attr_type(self._op_type, name)
        return backprop.make_attr(kind, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def raw(self, name: str) -> Any:
        """Return a value in the form in which TensorFlow passes it."""
        return self._raw[name]


class EagerOp:
    """One execution of an op.

    Attributes:
        type: The op type, such as ``Conv2D``.
        name: The readable name of its site.
    """

    __slots__ = ("_attributes", "_inputs", "_outputs", "name", "type")

    def __init__(self, type: str, name: str, attributes: Attributes, inputs: Sequence[Any]) -> None:
        self.type, self.name = type, name
        self._attributes = attributes
        self._inputs: tuple[Any, ...] | None = tuple(inputs)
        self._outputs: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"<EagerOp {self.name!r} type={self.type}>"

    @property
    def __name__(self) -> str:
        return self.type

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Its input tensors in one sequence, including those of lists."""
        return self._valid()

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Its output tensors; empty before it has run."""
        self._valid()
        return self._outputs

    def get_attr(self, name: str) -> Any:
        """Return an attribute in the form that `tf.Operation.get_attr` returns.

        Raises:
            ValueError: The op has no such attribute.
        """
        try:
            return self._attributes[name]
        except KeyError:
            raise ValueError(f"{self.type} has no attribute {name!r}") from None

    def ran(self, outputs: Sequence[Any]) -> None:
        """Set the outputs; called by the driver."""
        self._outputs = tuple(outputs)

    def release(self) -> None:
        """Drop the tensors; called by the driver."""
        self._inputs, self._outputs = None, ()

    def _valid(self) -> tuple[Any, ...]:
        if self._inputs is None:
            raise StaleContextError(
                "The tensors of an op are valid only during the call of a routine",
                where=repr(self),
                fix="Keep a copy of what is needed later under a key of the context",
            )
        return self._inputs
