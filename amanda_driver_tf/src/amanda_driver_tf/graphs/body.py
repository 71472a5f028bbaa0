"""`Body`: the nodes of a function or of a session's graph, as they are wired when they run.

Owns reading a body from a FunctionDef and the graph it was made from, or from a `tf.Graph`. A
function's graph may have grown since the function was made. Therefore the FunctionDef gives the
wiring, and the graph only tells which op a node is. A body is made for one rewriting, which changes
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from amanda_core.interface import UnsupportedError
from amanda_driver_tf.tensorflow_internals.modules import function_def_to_graph, op_def_registry
from amanda_driver_tf.tensorflow_internals.objects import output_types

__all__ = ["BACK", "Body", "Node", "Value", "is_ref", "outputs_of"]

_REF = 100  # DT_FLOAT_REF is DT_FLOAT + 100, and so on.


def is_ref(dtype: int) -> bool:
    """Return True if a DataType is a reference type."""
    return dtype > _REF


class Node:
    """One node: an op of the graph, or an argument of the function.

    Attributes:
        name: Its name in the FunctionDef or graph.
        op_type: Its op type; ``Placeholder`` for an argument.
        op: Its `tf.Operation`.
        inputs: Its data inputs; rewriting changes them.
        attrs: The attributes that rewriting has set, as AttrValues.
        controls: Its control inputs: names of existing nodes, and new nodes.
        dtypes: DataTypes of its outputs.
        is_argument: Whether it is an argument of the function.
    """

    __slots__ = (
        "attrs",
        "controls",
        "dtypes",
        "inputs",
        "is_argument",
        "name",
        "op",
        "op_type",
    )

    def __init__(self, name: str, op_type: str, op: Any, dtypes: Sequence[int]) -> None:
        self.name, self.op_type, self.op = name, op_type, op
        self.dtypes = tuple(dtypes)
        self.inputs: list[Value] = []
        self.controls: list[Any] = []
        self.attrs: dict[str, Any] = {}
        self.is_argument = False

    def __repr__(self) -> str:
        return f"<Node {self.name!r} ({self.op_type})>"

    def outputs(self) -> list[Value]:
        """Return its outputs as values."""
        return [Value(self, index) for index in range(len(self.dtypes))]


class Value(NamedTuple):
    """One output of a node. Nodes are compared by identity."""

    node: Any
    slot: int

    @property
    def dtype(self) -> int:
        """Its DataType."""
        return int(self.node.dtypes[self.slot])

    @property
    def base(self) -> int:
        """Its DataType; for a reference, the DataType of the value it refers to."""
        return self.dtype - _REF if is_ref(self.dtype) else self.dtype


class Body:
    """A graph's nodes in topological order, ignoring the back edges of TensorFlow 1 while loops.

    Attributes:
        graph: The graph that the ops belong to.
        nodes: All nodes except the arguments.
        arguments: The arguments of a function.
        results: The results of a function, by their names in its signature.
        control_results: Names of nodes that run though nothing depends on them.
        fdef: The FunctionDef; None for a session's graph.
        fed: Nodes that stand for fed tensors, by name of the op and index.
        running: Ids of the nodes that run in TensorFlow's own wiring.
        dropped: Ids of the nodes that would run, but which TensorFlow's optimizer drops.
    """

    def __init__(self, graph: Any, fdef: Any = None) -> None:
        self.graph = graph
        self.fdef = fdef
        self.nodes: list[Node] = []
        self.arguments: list[Node] = []
        self.results: dict[str, Value] = {}
        self.control_results: dict[str, str] = {}
        self.fed: dict[tuple[str, int], Node] = {}
        self.running: set[int] = set()
        self.dropped: set[int] = set()
        self._by_op: dict[int, Node] = {}

    def node_of(self, op: Any) -> Node | None:
        """Return the node of an op of the graph, or None."""
        node = self._by_op.get(id(op))
        return node if node is not None and node.op is op else None

    def value_of(self, tensor: Any) -> Value | None:
        """Return the value of a symbolic tensor of the graph, or None."""
        node = self.fed.get((tensor.op.name, tensor.value_index))
        if node is None or node.op is not tensor.op:
            node = self.node_of(tensor.op)
        return Value(node, tensor.value_index) if node is not None else None

    def roots(self) -> list[Any]:
        """Return the nodes that a function is run for: those of its results, and stateful ones."""
        by_themselves = set(self.control_results.values())
        return [
            *(value.node for value in self.results.values()),
            *(node for node in self.nodes if node.name in by_themselves),
        ]

    def reached(self, roots: Iterable[Any], rewired: Collection[int] | None = None) -> set[int]:
        """Return the ids of the nodes, old and new, that `roots` need in their present wiring.

        Args:
            roots: Nodes.
            rewired: Ids of the nodes whose inputs are followed; None for all.
        """
        by_name = {node.name: node for node in self.nodes}
        found: set[int] = set()
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in found:
                continue
            found.add(id(node))
            if rewired is not None and isinstance(node, Node) and id(node) not in rewired:
                continue
            waiting += [value.node for value in node.inputs]
            waiting += [by_name.get(c) if isinstance(c, str) else c for c in node.controls]
        return found

    def _add(self, node: Node) -> None:
        self._by_op[id(node.op)] = node
        (self.arguments if node.is_argument else self.nodes).append(node)

    @classmethod
    def of_function(cls, fdef: Any, graph: Any | None) -> Body:
        """Read the body of a function.

        Args:
            fdef: Its FunctionDef.
            graph: The FuncGraph that it was made from, if known; else one is made.

        Raises:
            UnsupportedError: It uses the name of a function as an op type. TensorFlow itself can
                read such a node only in the graph that defines the function.
        """
        made = [outputs_of(definition) for definition in fdef.node_def]
        ops = _matched(fdef, graph) if graph is not None else None
        if ops is None:
            graph = function_def_to_graph.function_def_to_graph(fdef)
            ops = (
                [tensor.op for tensor in graph.inputs],
                [graph.get_operation_by_name(definition.name) for definition in fdef.node_def],
            )
        body = cls(graph, fdef)
        arguments, inner = ops
        values: dict[str, Value] = {}
        for definition, op in zip(fdef.signature.input_arg, arguments, strict=True):
            node = Node(definition.name, "Placeholder", op, [definition.type])
            node.is_argument = True
            body._add(node)
            values[definition.name] = Value(node, 0)
        for definition, op, (names, dtypes) in zip(fdef.node_def, inner, made, strict=True):
            node = Node(definition.name, definition.op, op, dtypes)
            body._add(node)
            for index, name in enumerate(names):
                values[name] = Value(node, index)
        for definition, node in zip(fdef.node_def, body.nodes, strict=True):
            for source in definition.input:
                if source[0] == "^":
                    node.controls.append(source[1:])
                else:
                    node.inputs.append(values[source])
        body.nodes = in_order(body.nodes)
        body.results = {a.name: values[fdef.ret[a.name]] for a in fdef.signature.output_arg}
        body.control_results = dict(fdef.control_ret)
        return body

    @classmethod
    def of_graph(
        cls, graph: Any, operations: Iterable[Any], fed: Collection[tuple[str, int]] = ()
    ) -> Body:
        """Read the body of a session's run.

        Args:
            graph: Its graph.
            operations: The ops that run, in order of creation.
            fed: Tensors whose value is fed (name of the op, index).
        """
        body = cls(graph)
        for op in operations:
            body._add(Node(op.name, op.type, op, output_types(op)))
        for node in body.nodes:
            for tensor in node.op.inputs:
                node.inputs.append(body._source(tensor, fed))
            node.controls = [op.name for op in node.op.control_inputs]
        body.nodes = in_order(body.nodes)
        return body

    def _source(self, tensor: Any, fed: Collection[tuple[str, int]]) -> Value:
        key = (tensor.op.name, tensor.value_index)
        if key not in fed:
            source = self.value_of(tensor)
            assert source is not None, f"{tensor.name} is not among the operations"
            return source
        node = self.fed.get(key)
        if node is None:
            node = Node(tensor.op.name, "Placeholder", tensor.op, output_types(tensor.op))
            node.is_argument = True
            self.fed[key] = node
        return Value(node, tensor.value_index)


def _matched(fdef: Any, graph: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the ops of a function's arguments and nodes; None if `graph` is not the function's.

    They are matched by order of creation. Names do not match, since those that collide with the
    name of an argument or result are changed in the FunctionDef.
    """
    arguments = [tensor.op for tensor in graph.inputs][: len(fdef.signature.input_arg)]
    if len(arguments) != len(fdef.signature.input_arg):
        return None
    known = {id(op) for op in arguments}
    inner: list[Any] = []
    for op in graph.get_operations():
        if id(op) in known:
            continue
        if len(inner) == len(fdef.node_def):
            break
        definition = fdef.node_def[len(inner)]
        if definition.op != op.type:
            if op.type in ("Placeholder", "PlaceholderWithDefault"):
                continue  # An input captured after the function was made.
            return None
        inner.append(op)
    return (arguments, inner) if len(inner) == len(fdef.node_def) else None


def outputs_of(definition: Any) -> tuple[list[str], list[int]]:
    """Return the names (as a FunctionDef writes them) and DataTypes of a node's outputs."""
    op_def = op_def_registry.get(definition.op)
    if op_def is None:
        raise UnsupportedError(f"{definition.op!r} is the name of a function used as an op type")
    attr = definition.attr
    names: list[str] = []
    dtypes: list[int] = []
    for argument in op_def.output_arg:
        if argument.type_list_attr:
            types = list(attr[argument.type_list_attr].list.type)
        else:
            dtype = attr[argument.type_attr].type if argument.type_attr else argument.type
            if argument.is_ref:
                dtype += _REF
            types = [dtype] * (attr[argument.number_attr].i if argument.number_attr else 1)
        names += [f"{definition.name}:{argument.name}:{index}" for index in range(len(types))]
        dtypes += types
    return names, dtypes


#: Op types whose output is the back edge of a TensorFlow 1 while loop.
BACK = ("NextIteration", "RefNextIteration")


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """Sort nodes topologically, otherwise keeping the given order."""
    mine = {id(node) for node in nodes}
    done: set[int] = set()
    result: list[Node] = []
    for root in nodes:
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                result.append(node)
                continue
            if id(node) in done:
                continue
            done.add(id(node))
            stack.append((node, True))
            stack.extend(
                (value.node, False)
                for value in reversed(node.inputs)
                if id(value.node) in mine
                and id(value.node) not in done
                and value.node.op_type not in BACK
            )
    return result
