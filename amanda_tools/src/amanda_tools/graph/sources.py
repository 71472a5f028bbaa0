"""Origins of values that no operator produced: inputs, parameters, constants and graph calls.

Creates the sources of a tool's graphs and decides their kinds and names.
"""

from __future__ import annotations

from typing import Any, Literal

from amanda_core.interface.facts import Facts
from amanda_tools.graph.model import Edge, Graph, Op, Source
from amanda_tools.graph.values import EagerValues, Origin, Port
from amanda_tools.kit.tensors.types import TensorType, type_of

__all__ = ["SILENT", "Sources"]

_Kind = Literal["input", "parameter", "constant", "call"]
#: TensorFlow operators that hold values without computing anything. Other operators that tools
#: never see control the graph, and become calls.
SILENT: dict[str, _Kind] = {
    "Const": "constant",
    "Placeholder": "input",
    "PlaceholderV2": "input",
    "PlaceholderWithDefault": "input",
    "_Arg": "input",
    "VarHandleOp": "parameter",
    "Variable": "parameter",
    "VariableV2": "parameter",
}


class Sources:
    """Sources of the graphs of one tool.

    An input that has another value in each execution, such as a batch, is one source.
    """

    def __init__(self) -> None:
        #: Consumer, input position, item and name -> the source that was first seen there.
        self._known: dict[tuple[int, int, int | None, str], Source] = {}

    def of(
        self,
        values: EagerValues,
        value: Any,
        graph: Graph,
        op: Op,
        position: int,
        item: int | None = None,
        constant: bool = False,
        weight: str | None = None,
    ) -> Origin:
        """Return the origin of a value; create a source if it is new.

        Args:
            values: The known values of this namespace.
            value: A tensor that is not among them.
            graph: The graph.
            op: The operator that takes the value.
            position: Input position of the value.
            item: Index in the list at that position, if there is one.
            constant: Whether the value is known to be a parameter, a buffer or a constant.
            weight: The key of the parameter, or of the part of one, that the value is; None if it
                is none.
        """
        facts = values.facts
        if facts.symbol(value) is not None and hasattr(value, "op"):
            return self._symbolic(values, value, graph, op, position, item)
        kind: _Kind = "constant" if constant else "input"
        if facts.is_parameter(value) or (constant and facts.wants_gradient(value)):
            kind = "parameter"
        elif "resource" in facts.dtype(value):
            kind = "parameter"  # The handle of a TensorFlow variable.
        names = op.input_names
        name = names[position] if position < len(names) else str(position)
        named = f"{op.module or op.name}.{name}"
        # A parameter outside of modules has a number instead of a name.
        if weight is not None and not weight.startswith("#"):
            named = weight.partition(":")[2] or weight
        return self._origin(
            graph, (op.index, position, item, ""), kind, named, type_of(facts, value), op.program
        )

    def seed(self, facts: Facts, gradients: Any, graph: Graph, op: Op) -> None:
        """Add sources for the gradients with which a backward pass begins; `op` takes them."""
        for position, value in enumerate(gradients):
            kind = type_of(facts, value)
            if kind is not None:
                slot = (op.index, position, None, "")
                name = f"{op.name}.gradient"
                port = self._origin(graph, slot, "input", name, kind, op.program).port
                graph.connect(Edge(port.node, 0, op.index, position, executions=None))

    def _origin(
        self,
        graph: Graph,
        slot: tuple[int, int, int | None, str],
        kind: _Kind,
        name: str,
        type: TensorType | None,
        program: str,
    ) -> Origin:
        source = self._known.get(slot)
        if source is None:
            source = self._known[slot] = Source(-1, kind, name, type, program)
            graph.add(source)
        return Origin(Port(source.index, 0))

    def _symbolic(
        self,
        values: EagerValues,
        value: Any,
        graph: Graph,
        op: Op,
        position: int,
        item: int | None,
    ) -> Origin:
        symbol = value.op
        kind = SILENT.get(symbol.type, "call")
        name = str(symbol.name)
        if kind == "input" and "resource" in values.facts.dtype(value):
            kind, name = "parameter", _variable(symbol) or name
        slot = (op.index, position, item, str(symbol.name))
        origin = self._origin(graph, slot, kind, name, type_of(values.facts, value), op.program)
        if kind != "call":
            return origin
        node = origin.port.node
        for output, one in enumerate(symbol.outputs):
            values.set(one, Origin(Port(node, output)))
        for at, one in enumerate(symbol.inputs):
            before = values.find(one)
            if before is None:
                before = self.of(values, one, graph, op, at, -1)
                values.set_source(one, before)
            graph.connect(Edge(*before.port, node, at, executions=None))
        return Origin(Port(node, value.value_index))


def _variable(symbol: Any) -> str | None:
    """Return the name of the variable that an argument of a TensorFlow function refers to."""
    captures = getattr(symbol.graph, "captures", ())
    outer = next((outer for outer, inner in captures if inner is symbol.outputs[0]), None)
    for variable in getattr(symbol.graph, "variables", ()) if outer is not None else ():
        if variable.handle is outer:
            return str(variable.name).removesuffix(":0")
    return None
