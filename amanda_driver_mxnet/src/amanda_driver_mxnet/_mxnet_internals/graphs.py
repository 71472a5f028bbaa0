"""Graphs of hybridized blocks, as MXNet's JSON: the operators in them, and new programs of them.

`hybrid` rewrites the graphs.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet
from mxnet import gluon
from mxnet.ndarray import NDArray

#: Without it, MXNet takes a graph for one of its first releases, and upgrades it.
_VERSION = {"mxnet_version": ["int", 10901]}
Shapes = Sequence["tuple[int, ...] | None"]


class Operator:
    """A node of a graph.

    Attributes:
        written: The node as JSON.
        op_type: Type of the operator; ``null`` for a parameter or an input.
    """

    def __init__(self, written: dict[str, Any]) -> None:
        self.written = written
        self.op_type: str = written["op"]
        self.name: str = written["name"]
        self.attrs: dict[str, str] = written.get("attrs", {})

    @functools.cached_property
    def _alone(self) -> Any:
        """The operator as a graph of its own, with inputs of the names ``0``, ``1``, ..."""
        count = len(self.written["inputs"])
        nodes: list[dict[str, Any]] = [
            {"op": "null", "name": str(place), "inputs": []} for place in range(count)
        ]
        nodes.append({**self.written, "name": "", "inputs": [[n, 0, 0] for n in range(count)]})
        visible = _symbol(nodes, [[count, 0, 0]], _VERSION).get_internals().list_outputs()
        return _symbol(nodes, [[count, n, 0] for n in range(len(visible) - count)], _VERSION)

    @property
    def states(self) -> frozenset[int]:
        """Positions of arrays that it changes in place, beside its results."""
        return frozenset(map(int, self._alone.list_auxiliary_states()))

    def output_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shapes of its results; None for unknown ones."""
        return self._inferred(self._alone.infer_shape_partial, shapes)

    def output_types(self, types: Sequence[str]) -> list[str]:
        """Return the names of its results' dtypes."""
        found = self._inferred(self._alone.infer_type, types)
        return [str(getattr(kind, "__name__", None) or "float32").rstrip("_") for kind in found]

    def _inferred(self, infer: Any, given: Sequence[Any]) -> list[Any]:
        known = {
            str(place): tuple(value) if isinstance(value, list) else value
            for place, value in enumerate(given)
            if value is not None and place not in self.states
        }
        count = len(self._alone.list_outputs())
        try:
            found = infer(**known)[1]
        except (mxnet.MXNetError, ValueError, TypeError):
            found = None
        return list(found or [None] * count)


class Graph:
    """The graph of a hybridized block.

    Attributes:
        operators: Its nodes in an order in which they can run.
        data: The names of the block's inputs.
        heads: The entries that it returns.
    """

    def __init__(self, block: gluon.HybridBlock) -> None:
        inputs, self.symbol = block._cached_graph
        self._arguments = dict(zip(self.symbol.list_inputs(), block._cached_op_args, strict=True))
        self._flags = block._flags
        written = json.loads(self.symbol.tojson(remove_amp_cast=False))
        self._attrs = written.get("attrs", {})
        self.operators = [Operator(node) for node in written["nodes"]]
        self.heads: list[list[int]] = written["heads"]
        self.data: list[str] = [symbol.name for symbol in inputs]
        self.is_np = type(self.symbol) is not mxnet.symbol.Symbol

    def parameter(self, name: str) -> tuple[NDArray, bool]:
        """Return the array of a parameter, and whether it has a gradient."""
        parameter = self._arguments[name][1]
        return parameter._data[0], parameter.grad_req != "null"

    def compiled(self, nodes: list[dict[str, Any]], heads: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return a program of new nodes with the same parameters and inputs, and its arguments."""
        symbol = _symbol(nodes, heads, self._attrs)
        symbol = symbol.as_np_ndarray() if self.is_np else symbol
        arguments = [self._arguments[name] for name in symbol.list_inputs()]
        data = [place for place, (is_data, _) in enumerate(arguments) if is_data]
        parameters = [place for place, (is_data, _) in enumerate(arguments) if not is_data]
        flags = [("data_indices", data), ("param_indices", parameters), *self._flags]
        return mxnet.nd.CachedOp(symbol, flags), arguments


#: Block -> its graph.
_graphs: weakref.WeakKeyDictionary[gluon.HybridBlock, Graph] = weakref.WeakKeyDictionary()


def graph_of(block: gluon.HybridBlock, args: Sequence[Any]) -> Graph:
    """Return the graph of a hybridized block, which it traces at its first call."""
    if block._cached_op is None:
        block._build_cache(*args)
    graph = _graphs.get(block)
    if graph is None or graph.symbol is not block._cached_graph[1]:
        graph = _graphs[block] = Graph(block)
    return graph


@contextmanager
def swapped(block: gluon.HybridBlock, program: Any, arguments: list[Any]) -> Iterator[None]:
    """Let a hybridized block run another program in this block."""
    before = block._cached_op, block._cached_op_args
    block._cached_op, block._cached_op_args = program, arguments
    try:
        yield
    finally:
        block._cached_op, block._cached_op_args = before


def _symbol(nodes: list[dict[str, Any]], heads: Sequence[Any], attrs: Any) -> Any:
    variables = [number for number, node in enumerate(nodes) if node["op"] == "null"]
    written = {"nodes": nodes, "arg_nodes": variables, "heads": heads, "attrs": attrs}
    return mxnet.symbol.load_json(json.dumps(written))
