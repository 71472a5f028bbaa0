"""New nodes, which rewriting adds to a graph.

Owns their kinds and what each kind needs to be written. Others decide where they are inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda_driver_tf.graphs.body import Value

__all__ = ["Argument", "Flat", "Host", "Inlined", "Mark", "New", "Plain"]

#: A function over flat tensors.
Flat = Callable[[list[Any]], list[Any]]


class New:
    """A node that the graph did not have.

    Attributes:
        name: Its name, made unique when it is written.
        inputs: Its data inputs.
        dtypes: DataTypes of its outputs.
        controls: Its control inputs: names of existing nodes, and new nodes.
    """

    def __init__(self, name: str, inputs: Sequence[Value], dtypes: Sequence[int]) -> None:
        self.name = name
        self.inputs = list(inputs)
        self.dtypes = tuple(dtypes)
        self.controls: list[str | New] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def outputs(self) -> list[Value]:
        """Return its outputs as values."""
        return [Value(self, index) for index in range(len(self.dtypes))]


class Host(New):
    """A node that runs a Python function.

    Attributes:
        function: Takes a list of eager tensors and returns one tensor for each of `dtypes`.
    """

    def __init__(
        self,
        name: str,
        function: Flat,
        inputs: Sequence[Value],
        dtypes: Sequence[int],
    ) -> None:
        super().__init__(name, inputs, dtypes)
        self.function = function


class Inlined(New):
    """A node that calls the native operations traced from a staged routine.

    Attributes:
        function: The AtomicFunction.
        constants: Names of the nodes that hold its captured values, once they are written.
        anchor: A new node in whose loop frame the constants are placed, if there is one.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        inputs: Sequence[Value],
        dtypes: Sequence[int],
    ) -> None:
        super().__init__(name, inputs, dtypes)
        self.function = function
        self.constants: list[str] = []
        self.anchor: New | None = None


class Plain(New):
    """A new node of one of TensorFlow's op types.

    Attributes:
        op_type: Its op type.
        attrs: Its attributes, as AttrValues.
        output_names: Its outputs as a FunctionDef names them, such as ``handle:0``.
    """

    def __init__(
        self,
        name: str,
        op_type: str,
        inputs: Sequence[Value],
        dtypes: Sequence[int],
        attrs: dict[str, Any],
        output_names: Sequence[str],
    ) -> None:
        super().__init__(name, inputs, dtypes)
        self.op_type, self.attrs = op_type, attrs
        self.output_names = tuple(output_names)


class Mark(Plain):
    """A node that records when it ran, without Python."""


class Argument(New):
    """A new argument of the function."""

    def __init__(self, name: str, dtype: int) -> None:
        super().__init__(name, (), (dtype,))
