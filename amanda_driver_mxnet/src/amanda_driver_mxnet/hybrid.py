"""Hybridized blocks: twins of their graphs, in which nodes call the routines of tools.

Owns the analysis of a graph, and how it is rewritten. The twin of a block is kept by what it
depends on: the epoch of the tools, and which gradients are wanted. Contexts are opened while a
graph is rewritten; when it runs, only plans are executed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mxnet import autograd
from mxnet.ndarray import NDArray

from amanda_core import IPoint, Plan, Session, Site
from amanda_core.execution import Run, at, backward_plans, several
from amanda_core.scopes import Scope, Scopes
from amanda_driver_mxnet._mxnet_internals.arrays import children_of, dtype_of, needs_gradient
from amanda_driver_mxnet._mxnet_internals.graphs import Graph, Operator, graph_of, swapped
from amanda_driver_mxnet.custom_nodes import OPERATOR, Node
from amanda_driver_mxnet.facts import SymbolicArray
from amanda_driver_mxnet.gradients import Watch
from amanda_driver_mxnet.routines import fold

__all__ = ["Twins"]

#: How many twins of one block are kept.
_KEPT = 8
#: Roles of inputs that operators do not differentiate.
_INDICES = ("indices", "segments", "offsets")
Entry = tuple[int, int]


class Twins:
    """The rewritten graphs of hybridized blocks, which resume with the contexts.

    Attributes:
        session: The session that runs now.
    """

    def __init__(self, scopes: Scopes, namespace: str) -> None:
        self.session: Session
        self.scopes, self.namespace = scopes, namespace
        self._twins: weakref.WeakKeyDictionary[Any, dict[Any, _Twin]] = weakref.WeakKeyDictionary()

    def call(
        self, run: Callable[..., Any], block: Any, args: Sequence[Any], scope: Scope
    ) -> tuple[Any, bool]:
        """Run a block's twin; return its result, and whether gradients are watched in it."""
        session, graph = self.session, graph_of(block, args)
        arrays = [value for value in _flat(args) if isinstance(value, NDArray)]
        recording = autograd.is_recording()
        state = (recording, *(recording and needs_gradient(array) for array in arrays))
        twins = self._twins.setdefault(block, {})
        twin = twins.get((session.epoch, state)) if session.caching else None
        if twin is None or twin.graph is not graph:
            twin = _Twin(self, block, graph, arrays, state, scope)
            if session.caching:
                twins[session.epoch, state] = twin
                while len(twins) > _KEPT:
                    del twins[next(iter(twins))]
        if not twin.nodes:
            return run(block, *args), False
        with swapped(block, *twin.program):
            result = run(block, *args)
        for array in _flat(result):
            array.wait_to_read()
        session.raise_pending()
        return result, twin.watched


class _Twin:
    """A graph with nodes for the plans of its ops; without them nothing is planned."""

    def __init__(
        self,
        twins: Twins,
        block: Any,
        graph: Graph,
        arrays: Sequence[NDArray],
        state: Sequence[bool],
        scope: Scope,
    ) -> None:
        self.twins, self.graph, self.scope = twins, graph, scope
        self.recording, *wanted = state
        self.watched = False
        self.nodes: list[Node] = []
        self._written: list[dict[str, Any]] = []
        #: An entry of the graph -> that of the twin, and its placeholder.
        self._entries: dict[Entry, Entry] = {}
        self._arrays: dict[Entry, SymbolicArray] = {}
        self._places = list(_places_of(block, scope.path))
        self._counts: dict[str, int] = {}
        self._weights = {id(array): name for name, _, array in twins.scopes.weights(scope.root)}
        given = dict(zip(graph.data, zip(arrays, wanted, strict=True), strict=True))
        for number, operator in enumerate(graph.operators):
            if operator.op_type != "null":
                self._rewrite(number, operator)
                continue
            array, is_wanted = given.get(operator.name) or graph.parameter(operator.name)
            own = None if operator.name in given else array
            self._arrays[number, 0] = SymbolicArray(
                tuple(array.shape), dtype_of(array), own, self.recording and is_wanted
            )
            self._entries[number, 0] = self._write(operator.written), 0
        heads = [[*self._entries[node, place], 0] for node, place, *_ in graph.heads]
        self.program = graph.compiled(self._written, heads) if self.nodes else (None, [])

    def _rewrite(self, number: int, operator: Operator) -> None:
        twins, session = self.twins, self.twins.session

        def session_of() -> Session:
            return twins.session

        sources = [(node, place) for node, place, *_ in operator.written["inputs"]]
        inputs = [self._arrays[source] for source in sources]
        types = operator.output_types([value.dtype for value in inputs])
        shapes = operator.output_shapes([value.shape for value in inputs])
        wanted = any(value.wanted for value in inputs)
        outputs = [
            SymbolicArray(shape, dtype, None, wanted and dtype.startswith("float"))
            for shape, dtype in zip(shapes, types, strict=True)
        ]
        context = session.open(
            self._site(operator, inputs),
            operator.op_type,
            inputs,
            operator.attrs,
            constant=lambda value: value.array,
        )
        try:
            before = context.trigger_callback(IPoint.BEFORE_FORWARD)
            context.fill(outputs=outputs)
            after = context.trigger_callback(IPoint.AFTER_FORWARD)
            roles: Sequence[str] = context.get("input_roles") or ()
        finally:
            context.release()
        indices = {place for place, role in enumerate(roles) if role in _INDICES}
        places = [n for n, value in enumerate(inputs) if value.wanted and n not in indices]
        arriving = [place for place, value in enumerate(outputs) if value.wanted]
        watch = Watch(session_of, context, places, len(inputs))
        plans = backward_plans(context)
        is_watched = bool(places and arriving and (any(plans) or session.wants_backward))
        self.watched = self.watched or is_watched

        entries = [self._entries[source] for source in sources]
        self._fold(entries, before, operator.states, set(places))
        if is_watched:
            self._gate(entries, places, watch.leave)
        made = self._run(operator, before, entries, types)
        if before.steps and not entries:
            made = self._node(
                made, lambda values: [*fold(session_of(), before, []), *values], None, types
            )
        if is_watched and watch.replacement is not None:
            made = [self._without_gradient(entry) for entry in made]
            values = [*made, *(entries[place] for place in places)]
            made = self._written_node(watch.replacing(outputs), values)
        elif is_watched:
            self._gate(made, arriving, watch.arrive)
        self._fold(made, after, frozenset(), set(arriving))
        for place, (entry, value) in enumerate(zip(made, outputs, strict=True)):
            self._entries[number, place], self._arrays[number, place] = entry, value

    def _site(self, operator: Operator, inputs: Sequence[SymbolicArray]) -> Site:
        inside = [one for one in self._places if operator.name.startswith(one[0])]
        prefix, path = max(inside, key=lambda one: len(one[0]), default=("", self.scope.path))
        base = f"{path}/{operator.op_type}" if path else operator.op_type
        count = self._counts[base] = self._counts.get(base, 0) + 1
        names = [self._weights.get(id(value.array)) for value in inputs]
        weights = tuple((place, name) for place, name in enumerate(names) if name is not None)
        name = operator.name.removeprefix(prefix)
        return Site(
            key=("op", self.scope.root, path, operator.op_type, name, weights, count),
            op_type=operator.op_type,
            namespace=self.twins.namespace,
            name=base if count == 1 else f"{base}#{count}",
            module_path=path,
        )

    # The nodes of the twin.

    def _run(
        self, operator: Operator, before: Plan, entries: Sequence[Entry], types: Sequence[str]
    ) -> list[Entry]:
        """Write an op, or what replaces it."""
        replacement = before.replacement
        if replacement is None:
            versions = [source[2:] for source in operator.written["inputs"]]
            inputs = [[*entry, *end] for entry, end in zip(entries, versions, strict=True)]
            number = self._write({**operator.written, "inputs": inputs})
            return [(number, place) for place in range(len(types))]
        return self._node(
            entries,
            lambda values: several(replacement.replace(values)),
            None,
            types,
            operator.output_shapes,
            taped=self.recording,
        )

    def _fold(
        self, entries: list[Entry], plan: Plan, states: frozenset[int], wanted: set[int]
    ) -> None:
        """Write a node that executes the insertions of a plan, and let the entries pass it."""
        if not plan.steps or not entries:
            return
        asked = [step.action.positions for step in plan]
        everything = range(len(entries))
        chosen = sorted({n for places in asked for n in (everything if places is None else places)})
        # MXNet drops a node whose results nothing reads, and states are read from the program.
        live = next((place for place in everything if place not in states), None)
        if live is not None and states.issuperset(chosen):
            chosen.insert(0, live)
        run = at(
            chosen,
            len(entries),
            lambda values: fold(self.twins.session, plan, values, states, fixed=True),
        )
        taped = self.recording and any(step.action.autodiff for step in plan)
        made = self._node([entries[place] for place in chosen], run, None, (), None, taped=taped)
        for place, entry in zip(chosen, made, strict=True):
            if place not in states:  # The op must get a state itself.
                passes = place in wanted or not self.recording
                entries[place] = entry if passes else self._without_gradient(entry)

    def _gate(self, entries: list[Entry], places: Sequence[int], backward: Run) -> None:
        """Write a node that executes plans of gradients, and let the entries pass it."""
        backward = at(places, len(entries), backward)
        made = self._node([entries[n] for n in places], lambda values: values, backward, ())
        for place, entry in zip(places, made, strict=True):
            entries[place] = entry

    def _node(
        self,
        entries: Sequence[Entry],
        run: Run,
        backward: Run | None = None,
        types: Sequence[str] = (),
        shapes: Any = None,
        *,
        taped: bool = False,
    ) -> list[Entry]:
        twins = self.twins
        node = Node(lambda: twins.session, len(entries), run, backward, types, shapes, taped)
        return self._written_node(node, entries)

    def _written_node(self, node: Node, entries: Sequence[Entry]) -> list[Entry]:
        node.is_np, node.in_graph = self.graph.is_np, True
        self.nodes.append(node)
        number = self._write(
            {
                "op": "Custom",
                "name": f"{OPERATOR}{node.number}",
                "attrs": {"op_type": OPERATOR, "number": str(node.number)},
                "inputs": [[*entry, 0] for entry in entries],
            }
        )
        return [(number, place) for place in range(len(node.types) or len(entries))]

    def _without_gradient(self, entry: Entry) -> Entry:
        name = f"{OPERATOR}_constant{len(self._written)}"
        return self._write({"op": "BlockGrad", "name": name, "inputs": [[*entry, 0]]}), 0

    def _write(self, written: dict[str, Any]) -> int:
        self._written.append(written)
        return len(self._written) - 1


def _flat(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [item for value in values for item in _flat(value)]
    return [values]


def _places_of(block: Any, path: str) -> list[tuple[str, str]]:
    """Return the prefix of names in each block inside a block, with the block's path."""
    found = [(str(block.prefix), path)]
    for name, child in children_of(block).items():
        found += _places_of(child, f"{path}.{name}" if path else name)
    return found
