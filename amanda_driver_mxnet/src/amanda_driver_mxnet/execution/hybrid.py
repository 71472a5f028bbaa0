"""Hybridized blocks: their graphs, run operator by operator while a tool acts in them.

Owns the sites of operators in graphs. MXNet's own program runs while no tool acts in a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mxnet import gluon
from mxnet.ndarray import NDArray

from amanda_core.driver_kit import OpRecord, Scope, modules_of, several
from amanda_core.interface import Site
from amanda_driver_mxnet.execution.eager import Call, ImperativeProgram
from amanda_driver_mxnet.mxnet_internals.arrays import children_of, op_info
from amanda_driver_mxnet.mxnet_internals.graphs import Graph, handle_of

__all__ = ["HybridPrograms"]


class HybridPrograms:
    """The graphs of hybridized blocks that run in one thread.

    Args:
        eager: Executes single operators.
        namespace: The namespace of operators in graphs.
    """

    def __init__(self, eager: ImperativeProgram, namespace: str) -> None:
        self._eager, self._namespace = eager, namespace
        #: Graph -> number of the scope of its block -> the records of its operators.
        self._records: weakref.WeakKeyDictionary[Graph, dict[int, list[OpRecord | None]]] = (
            weakref.WeakKeyDictionary()
        )

    def is_idle(self, graph: Graph, scope: Scope) -> bool:
        """Return True if no tool acts at any operator of a graph."""
        known = self._records.get(graph, {}).get(scope.number)
        return known is not None and all(
            record is None or self._eager.is_idle(record) for record in known
        )

    def run(
        self, graph: Graph, block: gluon.HybridBlock, scope: Scope, arrays: Sequence[NDArray]
    ) -> Any:
        """Run the graph of a block on its inputs and parameters, as its own program does."""
        known = self._records.setdefault(graph, {})
        if scope.number not in known:
            known_names = {
                id(array): name for name, _, array in self._eager.scopes.weights(scope.root)
            }
            weights = {
                node: known_names[id(array)]
                for node, array in zip(graph.inputs, arrays, strict=True)
                if id(array) in known_names
            }
            known[scope.number] = list(self._sites(graph, block, scope, weights))
        device = arrays[0].ctx
        values: dict[int, list[Any]] = {
            node: [array] for node, array in zip(graph.inputs, arrays, strict=True)
        }
        for number, (operator, record) in enumerate(
            zip(graph.known(arrays), known[scope.number], strict=True)
        ):
            if record is not None:
                inputs = [values[node][place] for node, place in operator.sources]
                run = partial(operator.run, device=device, is_np=graph.is_np)
                names = op_info(handle_of(operator.op_type)).inputs
                call = Call(operator.op_type, inputs, run, names, operator.attrs)
                values[number] = several(self._eager.execute_at(record, call))
        outputs = [values[node][place] for node, place in graph.heads]
        return outputs if len(outputs) > 1 else outputs[0]

    def _sites(
        self, graph: Graph, block: gluon.HybridBlock, scope: Scope, weights: Mapping[int, str]
    ) -> Iterator[OpRecord | None]:
        """Yield the record of each operator of a graph, None for inputs and parameters.

        Args:
            graph: The graph.
            block: Its block.
            scope: The scope of the block.
            weights: The nodes of parameters, and their names.
        """
        modules = modules_of(block, children_of, scope.path)
        places = [(str(module.prefix), path) for path, module in modules]
        counts: dict[str, int] = {}
        for operator in graph.operators:
            if operator.op_type == "null":
                yield None
                continue
            inside = [place for place in places if operator.name.startswith(place[0])]
            prefix, path = max(inside, key=lambda one: len(one[0]), default=("", scope.path))
            base = f"{path}/{operator.op_type}" if path else operator.op_type
            count = counts[base] = counts.get(base, 0) + 1
            name = operator.name.removeprefix(prefix)
            read = [(n, weights.get(node)) for n, (node, _) in enumerate(operator.sources)]
            own = tuple((place, weight) for place, weight in read if weight is not None)
            site = Site(
                key=("op", scope.root, path, operator.op_type, name, own, count),
                op_type=operator.op_type,
                namespace=self._namespace,
                name=base if count == 1 else f"{base}#{count}",
                module_path=path,
            )
            yield OpRecord(site)
