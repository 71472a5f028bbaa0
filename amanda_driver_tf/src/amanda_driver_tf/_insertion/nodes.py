"""New nodes: what rewriting puts into a graph beside the nodes that were there.

Owns the kinds and what each needs to be written down; where they stand, others say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda_driver_tf._graphs.body import Value

__all__ = ["Argument", "Flat", "Host", "Inlined", "New", "Plain"]

#: A function over flat tensors.
Flat = Callable[[list[Any]], list[Any]]


class New:
    """A node that the graph did not have.

    Attributes:
        name: Its name once it is written down, made unique there.
        inputs: Where its data comes from.
        dtypes: DataTypes of its outputs.
        controls: Nodes that must run before it: names of the graph's, and new ones.
    """

    def __init__(self, name: str, inputs: Sequence[Value], dtypes: Sequence[int]) -> None:
        self.name = name
        self.inputs = list(inputs)
        self.dtypes = tuple(dtypes)
        self.controls: list[str | New] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def outputs(self) -> list[Value]:
        """Its outputs as values."""
        return [Value(self, index) for index in range(len(self.dtypes))]


class Host(New):
    """A Python function that runs at each execution of the node.

    Attributes:
        function: Gets a list of eager tensors, returns as many as there are `dtypes`.
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
    """A call of a function that was traced from a routine: native operations.

    Attributes:
        function: The AtomicFunction.
        constants: Names of the nodes that hold what it captured, once they are written down.
        anchor: A new node whose frame these are to be in, if it stands in one.
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
    """An op of TensorFlow's.

    Attributes:
        op_type: Its type.
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


class Argument(New):
    """An argument that the function did not have."""

    def __init__(self, name: str, dtype: int) -> None:
        super().__init__(name, (), (dtype,))
