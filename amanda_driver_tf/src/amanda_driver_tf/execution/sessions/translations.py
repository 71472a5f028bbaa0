"""Translations: what a session runs instead of the fetches, feeds and targets that are asked for.

Owns the hidden clones in the same graph that compute them, so that variables, queues and iterators
remain the session's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from amanda_core.driver_kit import Session
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.execution.sessions import hiding
from amanda_driver_tf.execution.sessions.clones import Part, clone, dirty_nodes
from amanda_driver_tf.graphs import records
from amanda_driver_tf.graphs.analysis import Analysis
from amanda_driver_tf.graphs.body import Body, Node, Value
from amanda_driver_tf.graphs.kernel_state import draws
from amanda_driver_tf.graphs.pruning import find_dropped
from amanda_driver_tf.insertion.function_def_writing import Written
from amanda_driver_tf.insertion.nodes import New
from amanda_driver_tf.rewriting.function_rewriting import Call, FunctionRewriter
from amanda_driver_tf.rewriting.rewritten_function import RewrittenFunction
from amanda_driver_tf.tensorflow_internals.objects import (
    c_operation,
    c_output,
    function_in,
    operation_number,
    operation_of,
)
from amanda_driver_tf.threads import Request

__all__ = ["Asked", "Translation", "Translations", "Translator"]

# How many translations of different runs are kept.
_RUNS_KEPT = 64
#: Attribute of a graph: its translations, and what each runs.
_RUNS = "_amanda_runs"


class Translation:
    """The graph elements that run instead of one combination of fetches, feeds and targets.

    A translation may outlive the graph. It must not hold ops, since TensorFlow's handle of an op
    keeps the graph alive. So the graph holds the ops, under the translation as key.

    Args:
        graph: The graph.
        written: What must stay alive as long as the translation; None if the run is not changed.
        fetches: The tensors that are fetched instead.
        targets: The ops that are run instead.
        is_edited: Whether inserted routines may change a value, rather than only observe.
    """

    def __init__(
        self,
        graph: Any,
        written: Written | None,
        fetches: list[Any],
        targets: list[Any],
        is_edited: bool = False,
    ) -> None:
        self.written = written
        self.is_edited = is_edited
        if written is not None:
            known = getattr(graph, _RUNS, None)
            if known is None:
                known = weakref.WeakKeyDictionary()
                setattr(graph, _RUNS, known)
            known[self] = fetches, targets

    def run(self, graph: Any, request: Request) -> tuple[list[Any], ...]:
        """Return the outputs and ops of the C API to run instead of the requested ones."""
        if self.written is None:
            return request.fetches, request.targets
        tensors, operations = getattr(graph, _RUNS)[self]
        return [c_output(tensor) for tensor in tensors], [c_operation(op) for op in operations]


class Translations:
    """The translations of one session; kept for sessions that resume it. Holds no graph."""

    def __init__(self) -> None:
        self.found: dict[Any, Translation] = {}

    def put(self, graph: Any, key: Any, translation: Translation) -> None:
        """Keep a translation for as long as its graph lives."""
        while len(self.found) >= _RUNS_KEPT:
            del self.found[next(iter(self.found))]
        self.found[key] = translation
        weakref.finalize(graph, _drop, weakref.ref(self), key).atexit = False


def _drop(reference: weakref.ref[Translations], key: Any) -> None:
    translations = reference()
    if translations is not None:
        translations.found.pop(key, None)


class Asked(NamedTuple):
    """What a run asks of a graph.

    Attributes:
        fetched: The ops whose outputs are fetched, each with the index of the output.
        fed: The names of the ops whose outputs are fed, each with the index of the output.
        targets: Further ops that run.
    """

    fetched: list[tuple[Any, int]]
    fed: set[tuple[str, int]]
    targets: list[Any]

    @classmethod
    def of(cls, graph: Any, request: Request) -> Asked:
        """Return what the arguments of a run ask for."""
        return cls(
            [(operation_of(graph, output.oper), output.index) for output in request.fetches],
            {(operation_of(graph, output.oper).name, output.index) for output in request.feeds},
            [operation_of(graph, target) for target in request.targets],
        )

    @property
    def names(self) -> tuple[Any, ...]:
        """The same by names, which are equal for the same run."""
        fetched = tuple((op.name, index) for op, index in self.fetched)
        return fetched, tuple(sorted(self.fed)), tuple(op.name for op in self.targets)

    def needed(self, with_forward: bool = False) -> list[Any]:
        """Return the ops that the run needs, in order of creation; fed tensors need no ops.

        Args:
            with_forward: Whether to add the forward op of every gradient, and what that needs.
        """
        return _needed([*(op for op, _ in self.fetched), *self.targets], self.fed, with_forward)

    def value(self, body: Body, op: Any, index: int) -> Value:
        """Return the output of an op in a body of the graph."""
        node = body.fed.get((op.name, index)) or body.node_of(op)
        assert isinstance(node, Node)
        return Value(node, index)


class Translator:
    """Translates one run.

    Args:
        session: The session of tools.
        analysis: Returns the plans of ops.
        add_gap: Notes what is not instrumented, and why.
        graph: The graph.
        asked: What the run asks of it.
    """

    def __init__(
        self,
        session: Session,
        analysis: Analysis,
        add_gap: Callable[[str, str], None],
        graph: Any,
        asked: Asked,
    ) -> None:
        self._session, self._analysis, self._add_gap = session, analysis, add_gap
        self._graph, self._asked = graph, asked

    def translate(self, refused: UnsupportedError | None = None) -> Translation:
        """Return what runs instead.

        Args:
            refused: Why edits are refused, so that there may be observers only.
        """
        asked, library = self._asked, list[Any]()
        definition = _definition_in(self._graph)
        rewriter = FunctionRewriter(self._session, self._analysis, definition, self._add_gap)
        rewriter.add, rewriter.refused = library.append, refused
        # Gradients read the values that their forward ops ran on, even if these ops do not run.
        body = Body.of_graph(self._graph, asked.needed(with_forward=True), asked.fed)
        rewritten = RewrittenFunction("session", body)
        fetched = [asked.value(body, op, index) for op, index in asked.fetched]
        targets = list(map(body.node_of, asked.targets))
        changes = _Changes(body)
        find_dropped(body, [*(value.node for value in fetched), *targets])
        rewriter.rewrite_body(rewritten, Call())
        fetched = list(map(rewritten.rewriter.final, fetched))
        roots = [*(value.node for value in fetched), *targets]
        rewritten.edits.kept.settle(body.running, roots)
        rewriter.write_calls(rewritten)
        changes.find(rewritten, roots, {op.name for op in asked.needed()})
        if not changes:
            return Translation(self._graph, None, [], [])
        hiding.prepare(self._graph)
        part = self._part(rewritten, changes, roots, library, refused)
        cloned = clone(part, rewriter.written)
        tensors = [
            cloned.tensors.get((value.node.name, value.slot), op.outputs[index])
            for value, (op, index) in zip(fetched, asked.fetched, strict=True)
        ]
        operations = [cloned.operations.get(op.name, op) for op in asked.targets]
        return Translation(
            self._graph,
            rewriter.written,
            tensors,
            operations + cloned.kept,
            rewritten.is_edited(),
        )

    def _part(
        self,
        rewritten: RewrittenFunction,
        changes: _Changes,
        roots: list[Any],
        library: list[Any],
        refused: UnsupportedError | None,
    ) -> Part:
        """Return what is added to the graph: changed nodes with all that depends on them, and new
        ones.
        """
        body = rewritten.body
        dirty = dirty_nodes(body, changes.changed, rewritten.is_edited())
        dirty = [node for node in dirty if id(node) in changes.live]
        for node in dirty:
            if draws(node.op_type):
                self._add_gap(
                    f"the random sequence of {node.name!r}",
                    "the op depends on an edited value, so its clone starts a sequence of its own",
                )
        # An op that is not cloned has no control inputs from observers.
        reached = body.reached([*roots, *changes.kept], set(map(id, dirty)))
        alone = [made for made in changes.new if not made.dtypes and id(made) not in reached]
        if alone and refused is not None:
            raise refused  # Nothing would wait for the routine, which may turn out to edit.
        seen = set(map(id, changes.new)) - set(map(id, [*changes.kept, *alone]))
        awaited = [made for made in rewritten.edits.kept.awaited if id(made) in seen]
        return Part(body, dirty, changes.new, [*changes.kept, *alone, *awaited], library)


class _Changes:
    """What differs between a body and its graph once the body is rewritten.

    Args:
        body: The body, before it is rewritten.

    Attributes:
        live: The ids of the nodes that the run reaches.
        changed: The nodes of the graph among them that read something else.
        new: The new nodes among them.
        kept: The new nodes that run though nothing reads them.
    """

    live: set[int]
    changed: list[Node]
    new: list[New]
    kept: list[New | Node]

    def __init__(self, body: Body) -> None:
        self._before = {id(node): (list(node.inputs), len(node.controls)) for node in body.nodes}

    def __bool__(self) -> bool:
        return bool(self.changed or self.new)

    def find(self, rewritten: RewrittenFunction, roots: list[Any], needed: set[str]) -> None:
        """Compare.

        Args:
            rewritten: The rewritten body.
            roots: The nodes that are fetched or run.
            needed: Names of the ops that the plain run needs.
        """
        body, edits = rewritten.body, rewritten.edits
        self.kept = [
            made
            for made in edits.kept.nodes
            if needed.issuperset(control for control in made.controls if isinstance(control, str))
        ]
        self.live = body.reached([*roots, *self.kept])
        self.changed = [
            node for node in body.nodes if id(node) in self.live and self._is_changed(node)
        ]
        self.new = [node for node in edits.new if id(node) in self.live]

    def _is_changed(self, node: Node) -> bool:
        return bool(node.attrs or (node.inputs, len(node.controls)) != self._before[id(node)])


def _definition_in(graph: Any) -> Any:
    def definition(name: str) -> Any:
        function = function_in(graph, name)
        if function is None:
            raise UnsupportedError(f"The function {name!r} is not in the graph's library")
        return function.cached_definition

    return definition


def _needed(
    roots: Sequence[Any], fed: set[tuple[str, int]], with_forward: bool = False
) -> list[Any]:
    """Return the ops that a run needs, in order of creation; fed tensors need no ops.

    Args:
        roots: The ops that are fetched and run.
        fed: The fed tensors.
        with_forward: Whether to add the forward op of every gradient, and what that needs.
    """
    needed: dict[int, Any] = {}
    waiting = list(roots)
    found = records.Records.of(roots[0].graph) if roots and with_forward else None
    while waiting:
        op = waiting.pop()
        if operation_number(op) in needed:
            continue
        needed[operation_number(op)] = op
        waiting += op.control_inputs
        waiting += [t.op for t in op.inputs if (t.op.name, t.value_index) not in fed]
        if found is not None:
            # A gradient function that passes its argument on made no op that could be found.
            handing = (found.contributions().get((id(op), i), ()) for i in range(len(op.outputs)))
            for owner in (found.owner(op), *(owner for each in handing for owner, _ in each)):
                if owner is None:
                    continue
                # The op's own gradient may not read its output gradients, but a replacement may.
                arriving = [
                    part.op for each in owner.out_grads for part in records.components(each)
                ]
                waiting += [o for o in (owner.forward, *arriving) if o.graph is op.graph]
    return [needed[number] for number in sorted(needed)]
