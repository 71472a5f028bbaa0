"""`GraphMode`: graphs that a `tf.compat.v1.Session` runs, instrumented at each run.

Owns the translation of fetches, feeds and targets into hidden clones in the same graph, so that
variables, queues and iterators remain the session's own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core import CoverageGap, Session
from amanda_core.errors import UnsupportedError
from amanda_driver_tf._graphs import records
from amanda_driver_tf._graphs.analysis import Analysis
from amanda_driver_tf._graphs.body import Body, Node, Value
from amanda_driver_tf._graphs.constants import SessionConstants
from amanda_driver_tf._graphs.kernel_state import draws
from amanda_driver_tf._graphs.pruning import find_dropped
from amanda_driver_tf._insertion.function_def_writing import Written
from amanda_driver_tf._insertion.shape_checks import failed_check_error
from amanda_driver_tf._rewriting.function_rewriting import Call, FunctionRewriter
from amanda_driver_tf._rewriting.mode import Mode
from amanda_driver_tf._rewriting.rewritten_function import RewrittenFunction
from amanda_driver_tf._sessions import hiding
from amanda_driver_tf._sessions.calls import PATCHES, Request
from amanda_driver_tf._sessions.clones import Part, clone, dirty_nodes
from amanda_driver_tf._shared.namespaces import GRAPH
from amanda_driver_tf._shared.state import STATE, quietly
from amanda_driver_tf._tensorflow_internals.objects import (
    c_operation,
    c_output,
    extend_graph,
    function_in,
    operation_number,
    operation_of,
)

__all__ = ["GraphMode"]

_BUILDING = threading.RLock()
# How many translations of different runs are kept.
_RUNS_KEPT = 64
_ATTRIBUTE = "_amanda_runs"
_PARTIAL = "_amanda_partial_runs"


class _Translation:
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
            known = getattr(graph, _ATTRIBUTE, None)
            if known is None:
                known = weakref.WeakKeyDictionary()
                setattr(graph, _ATTRIBUTE, known)
            known[self] = fetches, targets

    def run(self, graph: Any, request: Request) -> tuple[list[Any], ...]:
        """Return the outputs and ops of the C API to run instead of the requested ones."""
        if self.written is None:
            return request.fetches, request.targets
        tensors, operations = getattr(graph, _ATTRIBUTE)[self]
        return [c_output(tensor) for tensor in tensors], [c_operation(op) for op in operations]


class _Translations:
    """The translations of one session; kept for sessions that resume it. Holds no graph."""

    def __init__(self) -> None:
        self.found: dict[Any, _Translation] = {}

    def put(self, graph: Any, key: Any, translation: _Translation) -> None:
        """Keep a translation for as long as its graph lives."""
        while len(self.found) >= _RUNS_KEPT:
            del self.found[next(iter(self.found))]
        self.found[key] = translation
        weakref.finalize(graph, _drop, weakref.ref(self), key).atexit = False


def _drop(reference: weakref.ref[_Translations], key: Any) -> None:
    translations = reference()
    if translations is not None:
        translations.found.pop(key, None)


class GraphMode(Mode):
    """Instruments the sessions that one thread runs.

    Args:
        session: The session whose tools instrument them.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session, PATCHES, "graph")
        self._reader = SessionConstants()
        self._analysis = Analysis(session, GRAPH, self._reader)
        self._translations = session.persistent("tensorflow.translations", _Translations)

    def start(self) -> None:
        """Start intercepting session runs in this thread."""
        super().start()
        STATE.graphs = self

    def stop(self) -> None:
        """Stop intercepting session runs; does nothing if not started."""
        if self.is_started:
            STATE.graphs = None
        super().stop()

    def coverage(self) -> Sequence[CoverageGap]:
        """Return the gaps in the coverage of session runs."""
        return [
            CoverageGap(
                "partial runs that were set up before the tools were applied",
                "they run without tools, and are refused if a tool would edit something",
            ),
            CoverageGap(
                "gradients that nothing reads",
                "tf.gradients requests them, but TensorFlow's optimizer drops them, and routines "
                "would cause them to be computed",
            ),
            CoverageGap(
                "CallableOptions",
                "callables of Session._make_callable_from_options run without Python",
            ),
            CoverageGap(
                "edits of ops in loops of TensorFlow 1 that are differentiated, or whose gradient "
                "is computed in another loop or branch than the op",
                "they are refused; observers run there, and so do edits of gradients",
            ),
            CoverageGap(
                "control outputs of ops", "Operation._control_outputs includes hidden clones"
            ),
            *(CoverageGap(what, why) for what, why in self._gaps.items()),
        ]

    def run(self, call: Callable[[Any, Any], Any], owner: Any, request: Request) -> Any:
        """Run a session.

        Args:
            call: Runs fetches and targets.
            owner: The session.
            request: The requested fetches, feeds and targets.
        """
        failures = self.session.failures
        try:
            translation = self._translation(owner, request)
        except Exception as error:
            if not failures.is_drivers(error):
                raise
            named = ", ".join(_op(owner.graph, output.oper).name for output in request.fetches[:3])
            failures.note(error, "tensorflow", f"a run of a session for {named}")
            return call(request.fetches, request.targets)
        outputs, operations = translation.run(owner.graph, request)

        def run() -> Any:
            extend_graph(owner)
            return call(outputs, operations)

        return self._execute(run)

    def _execute(self, call: Callable[[], Any], ends_step: bool = True) -> Any:
        """Run something that contains routines, and raise their exceptions."""
        session = self.session
        self._listener.listen(session)
        outermost = STATE.running == 0
        STATE.running += 1
        STATE.quiet += 1
        try:
            result = call()
        except BaseException as error:
            session.raised(error)
            session.raise_pending()
            refused = failed_check_error(error)
            if refused is not None:
                raise refused from error
            raise
        finally:
            STATE.running -= 1
            STATE.quiet -= 1
        session.raise_pending()
        if outermost and ends_step:
            session.end_step()
        return result

    # Partial runs.

    def set_up(self, call: Callable[[Any, Any], Any], owner: Any, request: Request) -> Any:
        """Set up a partial run and return its handle.

        Args:
            call: Sets up a run of fetches and targets.
            owner: The session.
            request: What will be fed, what may be fetched, and which ops run besides.
        """
        translation = self._translation(owner, request)
        outputs, operations = translation.run(owner.graph, request)
        # Ops that do not depend on feeds start to run now.
        handle = self._execute(lambda: call(outputs, operations), ends_step=False)
        pending = getattr(owner, _PARTIAL, None)
        if pending is None:
            pending = {}
            setattr(owner, _PARTIAL, pending)
        instead = dict(zip(_keys(owner.graph, request.fetches), outputs, strict=True))
        pending[handle] = translation, instead, set(instead)
        return handle

    def run_partially(
        self, call: Callable[[Any], Any], owner: Any, handle: Any, request: Request
    ) -> Any:
        """Continue a partial run.

        Args:
            call: Continues it for fetches.
            owner: The session.
            handle: The partial run.
            request: The requested fetches and feeds.

        Raises:
            UnsupportedError: It was set up before the tools were applied, and a tool edits
                something.
        """
        _, instead, waiting = getattr(owner, _PARTIAL, {}).get(handle, (None, None, None))
        if instead is None or waiting is None:
            if self.session.enabled and self._translation(owner, request).is_edited:
                raise UnsupportedError(
                    "A partial run was set up before the tools were applied",
                    fix="Call Session.partial_run_setup inside amanda.apply, too",
                )
            return call(request.fetches)
        keys = _keys(owner.graph, request.fetches)
        outputs = [instead.get(key, old) for key, old in zip(keys, request.fetches, strict=True)]
        waiting.difference_update(keys)
        if not waiting:
            self._finished(getattr(owner, _PARTIAL), handle)
        return self._execute(lambda: call(outputs), not waiting)

    def _finished(self, pending: dict[Any, Any], handle: Any) -> None:
        """Mark a partial run as finished. TensorFlow raises if its handle is used again."""
        pending[handle] = None, {}, set()
        done = [each for each, (translation, _, _) in pending.items() if translation is None]
        for each in done[:-_RUNS_KEPT]:
            del pending[each]

    # Translation.

    def _translation(self, owner: Any, request: Request) -> _Translation:
        graph, session = owner.graph, self.session
        fetched = [(_op(graph, output.oper), output.index) for output in request.fetches]
        fed = sorted((_op(graph, output.oper).name, output.index) for output in request.feeds)
        run = [_op(graph, target) for target in request.targets]
        key = (
            session.epoch,
            id(graph),
            tuple((op.name, index) for op, index in fetched),
            tuple(fed),
            tuple(op.name for op in run),
        )
        if session.caching:
            known = self._translations.found.get(key)
            if known is not None:
                return known
        with _BUILDING, quietly():
            self._analysis.sweep()
            self._reader.bind(owner)
            try:
                found = self._translate(graph, fetched, set(fed), run)
            except UnsupportedError as refused:
                # Routines that return None can still run, as observers.
                found = self._translate(graph, fetched, set(fed), run, refused)
            finally:
                self._reader.bind(None)
                self._analysis.forget()
        if session.caching:
            self._translations.put(graph, key, found)
        return found

    def _translate(
        self,
        graph: Any,
        fetched: list[tuple[Any, int]],
        fed: set[tuple[str, int]],
        run: list[Any],
        refused: UnsupportedError | None = None,
    ) -> _Translation:
        asked = [op for op, _ in fetched] + run
        runs = _needed(asked, fed)
        # Gradients read the values that their forward ops ran on, even if these ops do not run.
        body = Body.of_graph(graph, _needed(asked, fed, with_forward=True), fed)
        rewriter = FunctionRewriter(
            self.session, self._analysis, _definition_in(graph), self._add_gap
        )
        rewritten = RewrittenFunction("session", body)
        library: list[Any] = []
        rewriter.add = library.append
        rewriter.refused = refused
        wired = {id(node): (list(node.inputs), len(node.controls)) for node in body.nodes}
        asked_nodes = [_value(body, op, index, fed).node for op, index in fetched]
        find_dropped(body, [*asked_nodes, *map(body.node_of, run)])
        rewriter.rewrite_body(rewritten, Call())
        edits = rewritten.edits
        seen = [rewritten.rewriter.final(_value(body, op, index, fed)) for op, index in fetched]
        roots = [*(value.node for value in seen), *map(body.node_of, run)]
        edits.kept.settle(body.running, roots)
        rewriter.write_calls(rewritten)
        names = {op.name for op in runs}
        kept = [
            made
            for made in edits.kept.nodes
            if names.issuperset(control for control in made.controls if isinstance(control, str))
        ]
        live = body.reached([*roots, *kept])
        changed = [
            node
            for node in body.nodes
            if id(node) in live
            and ((node.inputs, len(node.controls)) != wired[id(node)] or node.attrs)
        ]
        new = [node for node in edits.new if id(node) in live]
        if not changed and not new:
            return _Translation(graph, None, [], [])
        hiding.prepare(graph)
        edited = rewritten.is_edited()
        dirty = [node for node in dirty_nodes(body, changed, edited) if id(node) in live]
        for node in dirty:
            if draws(node.op_type):
                self._add_gap(
                    f"the random sequence of {node.name!r}",
                    "the op depends on an edited value, so its clone starts a sequence of its own",
                )
        # An op that is not cloned has no control inputs from observers.
        reached = body.reached([*roots, *kept], set(map(id, dirty)))
        alone = [made for made in new if not made.dtypes and id(made) not in reached]
        if alone and refused is not None:
            raise refused  # Nothing would wait for the routine, which may turn out to edit.
        kept += alone
        written = rewriter.written
        cloned = clone(Part(body, dirty, new, kept, library), written)
        tensors = [
            cloned.tensors.get((value.node.name, value.slot), op.outputs[index])
            for value, (op, index) in zip(seen, fetched, strict=True)
        ]
        operations = [cloned.operations.get(op.name, op) for op in run]
        return _Translation(graph, written, tensors, operations + cloned.kept, edited)

    def _add_gap(self, what: str, why: str) -> None:
        self._gaps[what] = why


def _op(graph: Any, c_op: Any) -> Any:
    return operation_of(graph, c_op)


def _keys(graph: Any, outputs: Sequence[Any]) -> list[tuple[str, int]]:
    """Return the op name and index of each output of the C API."""
    return [(_op(graph, output.oper).name, output.index) for output in outputs]


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


def _value(body: Body, op: Any, index: int, fed: set[tuple[str, int]]) -> Value:
    node = body.fed.get((op.name, index)) or body.node_of(op)
    assert isinstance(node, Node)
    return Value(node, index)
