"""`Model`, `Graph` and `Node`: what the model of a session consists of.

Owns the reading of a model, the order of its nodes, the graphs inside nodes, and the arrays of
weights. It runs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import onnx
from onnx import AttributeProto, helper, inliner, numpy_helper

__all__ = ["Graph", "Model", "Node", "Operator", "copied", "every_graph", "is_random", "same"]

_TARGET = re.compile(r"target=torch\.ops\.\w+\.(\w+)")
#: Operators that draw random numbers, or may.
_RANDOM = re.compile("Bernoulli|.*Dropout|Multinomial|Random.*")
_GRAPHS = AttributeProto.GRAPH, AttributeProto.GRAPHS


class Operator:
    """The operator of a node, as `OpContext.get_op` returns it.

    Attributes:
        __name__: Its type, such as ``Conv``.
        domain: The domain of its type; empty for ONNX's own.
        node: The name of the node.
        exported: The operator of PyTorch that it was exported from; empty if it is not known.
    """

    def __init__(self, proto: onnx.NodeProto, metadata: Mapping[str, str]) -> None:
        self.__name__, self.domain, self.node = proto.op_type, proto.domain, proto.name
        found = _TARGET.search(metadata.get("pkg.torch.onnx.fx_node", ""))
        self.exported = "" if found is None else found.group(1)


class Node:
    """One operator in a graph.

    Attributes:
        proto: The node as ONNX has it.
        operator: Its operator.
        inputs: Names of its inputs; an empty one is not given.
        outputs: Names of its outputs; an empty one is not computed.
        captured: Names that graphs inside it read from outside.
        bodies: The graphs inside it, by attribute.
        attrs: Its attributes but for graphs.
        metadata: What an exporter wrote about it.
        index: Its place in the graph as the file has it.
    """

    def __init__(self, proto: onnx.NodeProto, model: Model, index: int) -> None:
        self.index = index
        self.proto, self.inputs, self.outputs = proto, list(proto.input), list(proto.output)
        self.metadata = {one.key: one.value for one in proto.metadata_props}
        self.operator = Operator(proto, self.metadata)
        self.bodies = {
            one.name: Graph(one.g, model) for one in proto.attribute if one.type == _GRAPHS[0]
        }
        #: Whether the driver runs its bodies. The first version of Scan has a batch axis.
        self.is_open = bool(
            self.bodies
            and proto.op_type in ("If", "Loop", "Scan")
            and proto.domain in ("", "ai.onnx")
            and (proto.op_type != "Scan" or len(self.bodies["body"].inputs) == len(self.inputs))
        )
        self.captured = list(dict.fromkeys(n for g in self.bodies.values() for n in g.captured))
        self.attrs = {
            one.name: _attribute(one) for one in proto.attribute if one.type not in _GRAPHS
        }
        #: Position of an input -> the weight or constant that it is.
        self.weights: dict[int, onnx.TensorProto] = {}

    @property
    def reads(self) -> list[str]:
        """Names of all values that it reads."""
        return [*filter(None, self.inputs), *self.captured]

    @property
    def name(self) -> str:
        """Its name, or that of what it computes first."""
        return self.proto.name or next(filter(None, self.outputs), self.proto.op_type)


class Graph:
    """A graph: that of a model, or one inside a node.

    Attributes:
        nodes: Its operators, each after those that it reads from.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        weights: Its initializers and constants, by name.
        captured: Names that it reads from the graph around it.
        kinds: Input -> its type, if it is not a tensor. The value need not tell it.
        dies: For each node the names that no later node reads and that are not outputs.
        later: For each node the names that nodes from there on read, and the outputs.
    """

    def __init__(self, proto: onnx.GraphProto, model: Model) -> None:
        # ONNX Runtime also makes sparse weights dense.
        for one in proto.sparse_initializer:
            proto.initializer.add().CopyFrom(_dense(one, one.values.name, model.folder))
        del proto.sparse_initializer[:]
        self.weights = {one.name: one for one in proto.initializer}
        nodes = []
        for index, one in enumerate(proto.node):
            constant = _constant(one)
            if constant is None:
                nodes.append(Node(one, model, index))
            else:
                self.weights[one.output[0]] = constant
        self.inputs = [one.name for one in proto.input]
        self.kinds = {o.name: o.type for o in proto.input if not o.type.HasField("tensor_type")}
        self.outputs = [one.name for one in proto.output]
        made = {*self.inputs, *self.weights}
        self.nodes, self.captured = _sorted(nodes, made)
        self.captured += [name for name in self.outputs if name not in made]
        self.later: list[set[str]] = [set(self.outputs)]
        self.dies: list[list[str]] = []
        for node in reversed(self.nodes):
            reads = {*node.reads}
            self.dies.append([n for n in (*reads, *node.outputs) if n not in self.later[-1]])
            self.later.append(self.later[-1] | reads)
        self.later.reverse()
        self.dies.reverse()

    def find_weights(self, around: Mapping[str, onnx.TensorProto]) -> None:
        """Tell each node which weights it reads, of this graph and of those around it."""
        visible = {**around, **self.weights}
        for node in self.nodes:
            node.weights = {n: visible[v] for n, v in enumerate(node.inputs) if v in visible}
            for body in node.bodies.values():
                body.find_weights(visible)

    def all_nodes(self) -> Iterator[Node]:
        """Yield the nodes, and those of the graphs inside them."""
        for node in self.nodes:
            yield node
            for body in node.bodies.values():
                yield from body.all_nodes()


class Model:
    """The model of a session.

    Attributes:
        proto: The model, without local functions.
        opset: The version of ONNX's own operators.
        folder: The folder of the files that hold its weights; empty if it has none.
        graph: Its graph.
        prefix: What names of new values and nodes begin with; no others do.
        key: A text for its nodes.
        weights_key: A number for its weights.
        is_random: Whether it draws random numbers.

    Args:
        proto: The model. Weights in other files are not read.
        folder: The folder.
    """

    def __init__(self, proto: onnx.ModelProto, folder: str) -> None:
        if len(proto.functions):
            proto = inliner.inline_local_functions(proto)
        self.folder, self.ir_version = folder, proto.ir_version
        self.proto, self.opsets, self.title = proto, list(proto.opset_import), proto.graph.name
        self.opset = next((o.version for o in self.opsets if o.domain in ("", "ai.onnx")), 0)
        self.graph = Graph(proto.graph, self)
        self.graph.find_weights({})
        self.prefix = _unused_prefix(set(_names(proto.graph)))
        lines = (
            f"{n.operator.domain}.{n.operator.__name__}({n.inputs})->{n.outputs}"
            for n in self.graph.all_nodes()
        )
        self.key = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        self.is_random = is_random(proto.graph)
        self.weights_key = 0
        for weight in self.graph.weights.values():
            text = f"{weight.name}{folder if weight.external_data else ''}".encode()
            self.weights_key = zlib.crc32(text, self.weights_key)
            self.weights_key = zlib.crc32(weight.SerializeToString(), self.weights_key)
        self._arrays: dict[str, tuple[onnx.TensorProto, Any]] = {}

    def array(self, weight: onnx.TensorProto) -> Any:
        """Return the values of a weight; the same object each time, which nobody may write."""
        found = self._arrays.get(weight.name)
        if found is None or found[0] is not weight:
            array = numpy_helper.to_array(weight, base_dir=self.folder)
            if array.flags.writeable:
                array.flags.writeable = False
            # Names of weights are unique in a model, but for those of separate branches.
            found = self._arrays[weight.name] = weight, array
        return found[1]

    def constant(self, value: Any) -> Any:
        """Return a value if it is the array of a weight, else None."""
        return value if any(value is array for _, array in self._arrays.values()) else None

    def part(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: Mapping[str, onnx.TypeProto],
        outputs: Sequence[str],
        weights: Sequence[onnx.TensorProto],
    ) -> onnx.ModelProto:
        """Return a model of some nodes. ONNX Runtime infers the types of its outputs."""
        graph = helper.make_graph(
            nodes,
            "part",
            [helper.make_value_info(name, kind) for name, kind in inputs.items()],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            weights,
        )
        return helper.make_model(graph, opset_imports=self.opsets, ir_version=self.ir_version)


def copied(proto: Any) -> Any:
    """Return a copy of a part of a model."""
    found = type(proto)()
    found.CopyFrom(proto)
    return found


def same(one: Any, other: Any) -> bool:
    """Return True if two arrays have the same bytes; texts are compared as such."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.hasobject:
        return bool(one.tolist() == other.tolist())  # Their bytes are addresses.
    return bool(one.tobytes() == other.tobytes())


def every_graph(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph, and those in its nodes."""
    yield graph
    for node in graph.node:
        for one in node.attribute:
            if one.type == AttributeProto.GRAPH:
                yield from every_graph(one.g)


def is_random(graph: onnx.GraphProto) -> bool:
    """Return True if an operator of a graph, or of those inside it, draws random numbers."""
    return any(_draws(node) for one in every_graph(graph) for node in one.node)


def _draws(node: onnx.NodeProto) -> bool:
    """Return True if a node may draw random numbers. Dropout needs an input to be in training."""
    is_inactive = node.op_type == "Dropout" and len(node.input) < 3
    return _RANDOM.fullmatch(node.op_type) is not None and not is_inactive


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of the nodes and values of a graph, and of those inside it."""
    for own in every_graph(graph):
        yield from (one.name for one in (*own.input, *own.initializer))
        for node in own.node:
            yield from (node.name, *node.output)


def _unused_prefix(names: set[str]) -> str:
    """Return what no name begins with. Some do in a model that was exported before."""
    prefixes = (f"amanda{n or ''}" for n in itertools.count())
    return next(p for p in prefixes if not any(name.startswith(f"{p}/") for name in names))


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value) if not value.external_data else None
    if attribute.type == AttributeProto.STRINGS:
        return [one.decode(errors="replace") for one in value]
    return list(value) if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


#: What a constant that is not a tensor consists of, as its attribute says -> the type of these.
_CONSTANTS = {"float": numpy.float32, "int": numpy.int64, "string": numpy.object_}


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the value of a node that ONNX Runtime takes for an initializer."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    (attribute,) = node.attribute
    if attribute.name == "value":
        found: onnx.TensorProto = copied(attribute.t)
    elif attribute.name == "sparse_value":
        found = _dense(attribute.sparse_tensor, "", "")
    else:  # Such as `value_float` for one, and `value_floats` for several.
        dtype: Any = _CONSTANTS[attribute.name.removeprefix("value_").removesuffix("s")]
        values = numpy.array(helper.get_attribute_value(attribute), dtype)
        found = numpy_helper.from_array(values)
    found.name = node.output[0]
    return found


def _dense(sparse: onnx.SparseTensorProto, name: str, folder: str) -> onnx.TensorProto:
    """Return a sparse tensor as a dense one."""
    values, places = (
        numpy_helper.to_array(one, base_dir=folder) for one in (sparse.values, sparse.indices)
    )
    found = numpy.zeros(tuple(sparse.dims), values.dtype)
    if places.ndim == 1:
        found.reshape(-1)[places] = values
    else:
        found[tuple(places.T)] = values
    return numpy_helper.from_array(found, name)


def _sorted(nodes: Sequence[Node], made: set[str]) -> tuple[list[Node], list[str]]:
    """Return nodes in an order in which they can run, and the names that they read from outside.

    Args:
        nodes: The nodes, in any order. Those that can stay where they are do.
        made: Names of what there is without them, to which those of results are added.
    """
    own = {name for node in nodes for name in node.outputs}
    outside = dict.fromkeys(n for node in nodes for n in node.reads if n not in own | made)
    waiting, found = list(nodes), []
    while waiting:
        left = []
        for node in waiting:
            if all(name in made or name in outside for name in node.reads):
                found.append(node)
                made.update(filter(None, node.outputs))
            else:
                left.append(node)
        if len(left) == len(waiting):
            raise ValueError(f"the nodes of the model form a cycle at {left[0].name}")
        waiting = left
    return found, list(outside)
