"""`GraphTracing`: build the graph of a program while it runs.

Decides when a node or an edge is added. The data model is in `model`, the identity of values in
`values`, and the origins of values that no operator produced in `sources`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from amanda_core import OpContext
from amanda_core.interface.facts import Facts
from amanda_tools.graph.facts import arguments_of, items_of, program_of
from amanda_tools.graph.model import Edge, Graph, Op
from amanda_tools.graph.result import Format, GraphResult, check
from amanda_tools.graph.sources import Sources
from amanda_tools.graph.values import EagerValues, Origin, Port, SymbolicValues
from amanda_tools.kit.operators.tool import OperatorTool, is_eager
from amanda_tools.kit.operators.weights import WeightKeys
from amanda_tools.kit.tensors.types import position_of
from amanda_tools.kit.tensors.values import facts_of

if TYPE_CHECKING:
    from amanda_tools.latency import Latency

__all__ = ["GraphTracing"]

_Kind = Literal["value", "alias"]


class GraphTracing(OperatorTool["_Traced"]):
    """Records operators, backward operators, and the values that pass between them.

    Each operator's context has the graph so far under ``"graph"`` and the operator's node under
    ``"graph_op"`` (None if it is not recorded). Tools that depend on this one use them to look back
    from an operator.

    Args:
        formats: The files to write: ``json``, which is always written; ``html``, an interactive
            page; ``dot`` and ``svg`` for Graphviz; ``tensorboard``; ``onnx`` for Netron, and
            ``onnx_backward`` with the backward operators; ``trace`` with the time of each
            execution, for Perfetto, which makes `Latency` time them. The default is ``json`` and
            ``html``.
        backward: Record backward operators as well.
        everything: Record operators outside the model as well, such as those of an optimizer or of
            a model's initialization. Collectives are always recorded.
        calls: Number of executions of each operator for which to record the source of each value,
            for `Graph.unrolled`.

    Raises:
        MissingExtraError: A format needs a package or program that is not installed.
        ValueError: A format is unknown, or `calls` is negative.

    Attributes:
        graphs: The graph of each namespace; it grows while the tool is applied.

    >>> tool = GraphTracing(formats=["html"])
    """

    # See values after other tools have changed them: those are what the next operator takes.
    outermost = True

    def __init__(
        self,
        formats: list[Format] | None = None,
        backward: bool = True,
        everything: bool = False,
        calls: int = 8,
    ) -> None:
        super().__init__(everything)
        if calls < 0:
            raise ValueError(f"calls must not be negative, but is {calls}")
        self.calls = calls
        self.formats: list[Format] = ["json", "html"] if formats is None else list(formats)
        check(self.formats)
        self.graphs: dict[str, Graph] = {}
        self._values: dict[str, EagerValues] = {}
        self._sources = Sources()
        #: Key in the metadata of backward nodes. Each node leaves a note under it at the
        #: nodes that run after it.
        self._came_from = object()
        self._latency: Latency | None = None
        if "trace" in self.formats:
            from amanda_tools.latency import Latency

            self._latency = Latency(backward, everything)
            self.depends_on(self._latency)
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)
            self.add_inst_for_op(self.analyse_grad_inputs, backward=True, require_outputs=True)

    def is_wanted(self, context: OpContext) -> bool:
        """Return True for operators of the model, collectives, and all others if these are wanted.

        What it cannot record is noted.
        """
        communicates = "wait" in context and self.why_unsupported(context) is None
        return super().is_wanted(context) or communicates

    # Forward.

    def analyse(self, context: OpContext) -> None:
        """Add an operator and its inputs to the graph, and follow its executions."""
        with self._clock, self._lock:
            graph = context["graph"] = self._graph_of(context)
            context["graph_op"] = None
            if not self.is_wanted(context):
                return
            inputs = context.get_inputs() or ()
            traced = self._meet(context, graph, inputs)
            context["graph_op"] = traced.op
            find = self._values_of(traced).find
            traced.constants = {
                position
                for position, value in enumerate(inputs)
                # Only for values that need a source, because asking may take long.
                if traced.is_eager and traced.facts.is_tensor(value) and find(value) is None
                if traced.facts.is_parameter(value) or context.value(position) is not None
            }
            traced.versions = [traced.versions_of(value) for value in inputs]
            traced.weights = WeightKeys(context, views=True)
            self._connect(traced, inputs)
            if traced.is_eager:
                context.insert_before_op(self.enter, observe=True, traced=traced)

    def analyse_outputs(self, context: OpContext) -> None:
        """Record the outputs of an operator."""
        traced = self.known(context)
        if traced is None:
            return
        with self._clock, self._lock:
            inputs, outputs = context.get_inputs() or (), context.get_outputs() or ()
            traced.op.outputs = traced.op.outputs or [
                position_of(traced.facts, value) for value in outputs
            ]
            traced.op.writes = traced.op.writes or [
                position
                for position, value in enumerate(inputs)
                if traced.was_written(value, position)
            ]
            self._note_writes(traced, inputs)
            self._set(traced, outputs)
            if traced.is_eager:
                context.insert_after_op(self.leave, observe=True, traced=traced)

    def enter(self, *inputs: Any, traced: _Traced) -> None:
        """Record the inputs of one execution."""
        with self._clock, self._lock:
            number = traced.call = traced.op.executions or 0
            for edge, call in self._connect(traced, inputs):
                edge.executions = (edge.executions or 0) + 1
                if number < self.calls:
                    edge.calls.append((call, number))
            traced.op.executions = number + 1
            self._note_writes(traced, inputs)

    def leave(self, *outputs: Any, traced: _Traced) -> None:
        """Record the outputs of one execution."""
        with self._clock, self._lock:
            self._set(traced, outputs)

    # Backward.

    def analyse_backward(self, context: OpContext) -> None:
        """Add a backward operator and its inputs to the graph."""
        with self._clock, self._lock:
            graph = context["graph"] = self._graph_of(context)
            context["graph_op"] = None
            if not self.is_wanted(context):
                return
            gradients = context.get_grad_outputs() or ()
            traced = self._meet(context, graph, gradients)
            context["graph_op"] = traced.op
            node = context.get_backward_op()
            if traced.has_nodes:
                if not traced.is_eager:
                    self._notes.setdefault(
                        "compiled callables: the edges of backward operators are not known"
                    )
                    return
                if node.node is not None:
                    self._connect_node(traced, node.node, 0)
                is_seed = context.forward is not None or not self._has_compiled
                if is_seed and not traced.graph.edges_into(traced.op):
                    self._sources.seed(traced.facts, gradients, graph, traced.op)
                context.insert_before_backward_op(
                    self.enter_node, observe=True, grad_outputs=[], traced=traced, op=node
                )
                return
            self._connect(traced, gradients)
            if traced.is_eager:
                context.insert_before_backward_op(self.enter, observe=True, traced=traced)

    def analyse_grad_inputs(self, context: OpContext) -> None:
        """Record the outputs of a backward operator."""
        traced = self.known(context)
        if traced is None:
            return
        with self._clock, self._lock:
            found = context.get_grad_inputs() or ()
            traced.op.outputs = traced.op.outputs or [
                position_of(traced.facts, value) for value in found
            ]
            if traced.has_nodes:
                return
            self._set(traced, found)
            if traced.is_eager:
                context.insert_after_backward_op(self.leave, observe=True, traced=traced)

    def enter_node(self, traced: _Traced, op: Any) -> None:
        """Record one execution of a node of the backward program."""
        with self._clock, self._lock:
            number, node = traced.op.executions or 0, op.node
            traced.op.executions = number + 1
            if node is None:
                return
            for edge in self._connect_node(traced, node, number):
                edge.executions = (edge.executions or 0) + 1
            node.metadata.pop(self._came_from, None)
            for output, (after, position) in enumerate(node.next_functions):
                while after is not None and after.name().startswith("Amanda"):
                    # Skip the driver's own nodes, which pass the gradients on.
                    ways = after.next_functions
                    after, position = ways[min(position, len(ways) - 1)] if ways else (None, 0)
                if after is not None:
                    words = after.metadata.setdefault(self._came_from, set())
                    words.add((traced.op.index, output, position))

    def result(self) -> GraphResult:
        """Return what has been traced so far."""
        timed = None if self._latency is None else self._latency.result()
        with self._lock:
            return GraphResult(
                [graph.copy() for graph in self.graphs.values()],
                self.formats,
                tool_seconds=self._clock.spent / 1e9,
                wall_seconds=self._clock.wall / 1e9,
                spans=() if timed is None else timed.spans,
                left_out=0 if timed is None else timed.left_out,
                notes=self.notes,
            )

    # Inside.

    def why_unsupported(self, context: OpContext) -> str | None:
        """Return why values cannot be followed in the namespace of this context, or None if they
        can.
        """
        known = is_eager(context.namespace) or facts_of(context).follows_graphs
        return super().why_unsupported(context) if known else "its graphs cannot be read"

    @property
    def _has_compiled(self) -> bool:
        """True if gradients may come from compiled code."""
        return any(namespace.endswith("/compiled") for namespace in self.graphs)

    def _graph_of(self, context: OpContext) -> Graph:
        graph = self.graphs.get(context.namespace)
        if graph is None:
            graph = self.graphs[context.namespace] = Graph(context.namespace)
        return graph

    def _values_of(self, traced: _Traced) -> EagerValues:
        values = self._values.get(traced.op.namespace)
        if values is None:
            values = (EagerValues if traced.is_eager else SymbolicValues)(traced.facts)
            self._values[traced.op.namespace] = values
        return values

    def _meet(self, context: OpContext, graph: Graph, inputs: Sequence[Any]) -> _Traced:
        traced = self.known(context)
        if traced is None:
            facts = facts_of(context)
            backward = context.is_backward()
            forward = context.forward
            before = self.known(forward) if forward is not None else None
            op = Op.of(
                context,
                index=-1,
                zone=context.zone,
                program=program_of(context),
                forward=before.op.index if before is not None else None,
                is_backward=backward,
                input_names=[] if backward else list(context.input_names),
                inputs=[position_of(facts, value) for value in inputs],
                arguments={} if backward else arguments_of(context),
                executions=0 if is_eager(context.namespace) else None,
            )
            if backward:
                op.id = context.get_backward_op_id() or 0
                word = context["backward_type"]
                op.word = word if isinstance(word, str) else None
            graph.add(op)
            made = _Traced(op, graph, facts)
            made.has_nodes = backward and hasattr(context.get_backward_op(), "node")
            traced = self.account_of(context, lambda: made)
        traced.context = weakref.ref(context)
        return traced

    def _connect(self, traced: _Traced, inputs: Sequence[Any]) -> Iterable[tuple[Edge, int]]:
        """Return the edges of one execution, created if new, and their producers' executions."""
        values = self._values_of(traced)
        taken: list[tuple[int, int | None, Port, _Kind]] = []
        calls: list[int] = []
        for position, at in enumerate(inputs):
            for item, value in items_of(traced.facts, at):
                origin = values.find(value)
                if origin is None:
                    origin = self._recomputed(traced, position, item)
                    if origin is None:
                        constant = item is None and position in traced.constants
                        weights = traced.weights
                        origin = self._sources.of(
                            values,
                            value,
                            traced.graph,
                            traced.op,
                            position,
                            item,
                            constant,
                            weights.at(position, item) if weights is not None else None,
                        )
                    values.set_source(value, origin)
                taken.append((position, item, origin.port, "value"))
                calls.append(origin.call)
                written = values.find_write(value)
                if written is not None and written.port != origin.port:
                    taken.append((position, item, written.port, "alias"))
                    calls.append(written.call)
        pattern = tuple(taken)
        known = traced.patterns.get(pattern)
        if known is None:
            known = traced.patterns[pattern] = [self._edge(traced, *facts) for facts in taken]
        return zip(known, calls, strict=True)

    def _edge(
        self, traced: _Traced, position: int, item: int | None, port: Port, kind: _Kind
    ) -> Edge:
        op = traced.op
        return traced.graph.connect(
            Edge(
                port.node,
                port.output,
                op.index,
                position,
                item,
                kind,
                first=op.executions or 0,
                executions=0 if traced.is_eager else None,
            )
        )

    def _recomputed(self, traced: _Traced, position: int, item: int | None) -> Origin | None:
        """Return the origin recorded by the first run, if this is a checkpoint's second run.

        A checkpoint runs its operators again on copies of their inputs, which are unknown values.
        """
        context = traced.context() if traced.context is not None else None
        if context is None or not context.recomputed or context.is_backward():
            return None
        for edge in traced.graph.edges_into(traced.op, position):
            if edge.item == item and edge.kind == "value":
                return Origin(Port(edge.producer, edge.output))
        return None

    def _note_writes(self, traced: _Traced, inputs: Sequence[Any]) -> None:
        values = self._values_of(traced)
        for position in traced.op.writes:
            if position < len(inputs):
                for _, value in items_of(traced.facts, inputs[position]):
                    values.set_written(value, Origin(Port(traced.op.index, None), traced.call))

    def _set(self, traced: _Traced, outputs: Sequence[Any]) -> None:
        values = self._values_of(traced)
        for position, at in enumerate(outputs):
            for _, value in items_of(traced.facts, at):
                origin = Origin(Port(traced.op.index, position), traced.call)
                written = values.last_write(value) if traced.op.writes else None
                if written is not None and written.port == Port(traced.op.index, None):
                    values.set_written(value, origin)
                else:
                    values.set(value, origin)

    def _connect_node(self, traced: _Traced, node: Any, number: int) -> list[Edge]:
        """Return the edges into a backward node for the execution with this number.

        The gradients of several readers arrive as their sum, so the identity of tensors does not
        tell where they come from. Instead each node leaves a note at the nodes that run after it.
        """
        words = frozenset(node.metadata.get(self._came_from, ()))
        known = traced.patterns.get(words)
        if known is None:
            known = traced.patterns[words] = [
                traced.graph.connect(
                    Edge(producer, output, traced.op.index, position, first=number)
                )
                for producer, output, position in sorted(words)
            ]
        return known


class _Traced:
    def __init__(self, op: Op, graph: Graph, facts: Facts) -> None:
        self.op, self.graph, self.facts = op, graph, facts
        self.is_eager = is_eager(op.namespace)
        #: Whether it is a backward operator that has a node, which leads to the next ones.
        self.has_nodes = False
        self.context: weakref.ref[OpContext] | None = None
        #: Origins of the inputs of one execution -> edges.
        self.patterns: dict[Hashable, list[Edge]] = {}
        #: Number of the current execution.
        self.call = 0
        #: Input positions that held a parameter, a buffer or a constant in the first execution.
        self.constants: set[int] = set()
        #: Its weights; None for a backward operator.
        self.weights: WeightKeys | None = None
        #: Versions of the input tensors before the operator ran, by position.
        self.versions: list[list[int | None]] = []

    def versions_of(self, value: Any) -> list[int | None]:
        """Return the versions of the tensors at a position."""
        return [self.facts.version(item) for _, item in items_of(self.facts, value)]

    def was_written(self, value: Any, position: int) -> bool:
        """Return True if the version of a tensor at an input position has changed since the op
        began.
        """
        return position < len(self.versions) and self.versions_of(value) != self.versions[position]
