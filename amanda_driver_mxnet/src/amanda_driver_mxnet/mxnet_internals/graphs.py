"""Graphs of hybridized blocks, as MXNet's JSON, and how one of their operators is run alone.

`execution.hybrid` runs a graph operator by operator.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mxnet
from mxnet import gluon
from mxnet._ctypes.ndarray import _imperative_invoke
from mxnet.base import _LIB, c_str, check_call
from mxnet.ndarray import NDArray

#: A size in the text of a shape that is not known.
_UNKNOWN = re.compile(r"[(, ](?:0|-1)(?=[,)])")
#: Without it, MXNet takes a graph for one of its first releases, and upgrades it.
_VERSION = {"mxnet_version": ["int", 10901]}


@functools.cache
def handle_of(op_type: str) -> Any:
    """Return MXNet's handle of an operator."""
    handle = ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(c_str(op_type), ctypes.byref(handle)))
    return handle.value


class Operator(NamedTuple):
    """A node of a graph.

    Attributes:
        op_type: Type of the operator; ``null`` for a parameter or an input.
        name: Its name in the graph.
        attrs: Its attributes, which are texts.
        sources: For each input, the index of the node that it comes from in `Graph.operators`, and
            the position among the outputs of that.
        program: The `CachedOp` that runs it if it has a body, such as a loop; else None.
    """

    op_type: str
    name: str
    attrs: Mapping[str, str]
    sources: Sequence[tuple[int, int]]
    program: Any

    def run(self, arrays: Sequence[NDArray], device: Any, is_np: bool) -> Any:
        """Run the operator, and return its result.

        Args:
            arrays: The inputs, in the order of `sources`.
            device: The `mxnet.Context` on which an operator without inputs makes its result, unless
                its attributes name one. Others run where their inputs are.
            is_np: Whether results are arrays of NumPy's interface, as in `Graph.is_np`. An operator
                with a body ignores it: its `program` has the interface of the graph.

        Returns:
            An array, or a list of several.
        """
        if self.program is not None:
            return self.program(*arrays)
        attrs = self.attrs if arrays else {"ctx": str(device), **self.attrs}
        return _imperative_invoke(
            handle_of(self.op_type), arrays, list(attrs), list(attrs.values()), None, is_np, False
        )


class Graph:
    """The graph of a hybridized block.

    Attributes:
        symbol: The graph, as MXNet has it.
        operators: Its nodes in an order in which they can run.
        inputs: Indices of the nodes of parameters and inputs, in the order in which a program gets
            these.
        heads: The outputs that it returns, as pairs like `Operator.sources`.
        is_np: Whether its arrays are those of NumPy's interface.
    """

    def __init__(self, symbol: Any) -> None:
        self.symbol, self.is_np = symbol, type(symbol) is not mxnet.symbol.Symbol
        written = json.loads(symbol.tojson(remove_amp_cast=False))
        numbers = {written["nodes"][number]["name"]: number for number in written["arg_nodes"]}
        self.inputs = [numbers[name] for name in symbol.list_inputs()]
        self.heads = [(node, place) for node, place, *_ in written["heads"]]
        self.operators = [
            Operator(
                node["op"],
                node["name"],
                node.get("attrs", {}),
                [(source, place) for source, place, *_ in node["inputs"]],
                self._alone(node) if "subgraphs" in node else None,
            )
            for node in written["nodes"]
        ]

    def known(self, arrays: Sequence[NDArray]) -> list[Operator]:
        """Return the operators, with the shapes that only follow from the inputs of the graph.

        The first states of recurrent layers are made so: their batch is not known to the block.

        Args:
            arrays: The inputs and parameters of the graph, in the order of `inputs`.
        """
        if not any(map(_is_open, self.operators)):
            return self.operators
        internals = self.symbol.get_internals()
        given = zip(self.symbol.list_inputs(), arrays, strict=True)
        _, shapes, _ = internals.infer_shape(**{name: array.shape for name, array in given})
        found = dict(zip(internals.list_outputs(), shapes, strict=True))
        return [
            one._replace(attrs={**one.attrs, "shape": str(tuple(found[f"{one.name}_output"]))})
            if _is_open(one)
            else one
            for one in self.operators
        ]

    def _alone(self, node: dict[str, Any]) -> Any:
        """Return a program of one operator; one that has a body has no other."""
        count = len(node["inputs"])
        nodes: list[dict[str, Any]] = [
            {"op": "null", "name": str(place), "inputs": []} for place in range(count)
        ]
        nodes.append({**node, "inputs": [[place, 0, 0] for place in range(count)]})
        outputs = range(int(node["attrs"]["num_outputs"]))
        heads = [[count, place, 0] for place in outputs]
        written = {"nodes": nodes, "arg_nodes": [*range(count)], "heads": heads, "attrs": _VERSION}
        symbol = mxnet.symbol.load_json(json.dumps(written))
        return mxnet.nd.CachedOp(symbol.as_np_ndarray() if self.is_np else symbol)


def _is_open(operator: Operator) -> bool:
    """Return True if an operator without inputs makes an array of which a size is not given."""
    shape = operator.attrs.get("shape", "")
    return bool(operator.op_type != "null" and not operator.sources and _UNKNOWN.search(shape))


#: Block -> its graph.
_graphs: weakref.WeakKeyDictionary[gluon.HybridBlock, Graph] = weakref.WeakKeyDictionary()


def graph_of(block: gluon.HybridBlock, args: Sequence[Any]) -> Graph:
    """Return the graph of a hybridized block, which the block traces here if it has none yet.

    Args:
        block: The block.
        args: The inputs of its call.
    """
    if block._cached_op is None:
        block._build_cache(*args)
    graph, symbol = _graphs.get(block), block._cached_graph[1]
    if graph is None or graph.symbol is not symbol:
        graph = _graphs[block] = Graph(symbol)
    return graph
