"""`GraphMode`: graphs that a `tf.compat.v1.Session` runs, instrumented at each run.

Owns the interception of runs and the translation of what is fetched, fed and run into clones that
stand hidden in the same graph, so that variables, queues and iterators are the session's own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from tensorflow.python.client import session as session_module
from tensorflow.python.framework import errors

from amanda_core import Blind, Session
from amanda_core.errors import UnsupportedError
from amanda_core.patching import Patches
from amanda_driver_tf._graph import hiding, records
from amanda_driver_tf._graph.analysis import Analysis
from amanda_driver_tf._graph.body import Body, Node, Value
from amanda_driver_tf._graph.clones import Cloned, clone, dirty_nodes
from amanda_driver_tf._graph.kernels import draws
from amanda_driver_tf._graph.mode import Mode
from amanda_driver_tf._graph.rewrite import Rewriter, Woven
from amanda_driver_tf._graph.shapes import refusal
from amanda_driver_tf._graph.write import Written
from amanda_driver_tf._namespaces import GRAPH
from amanda_driver_tf._state import STATE, quietly

__all__ = ["GraphMode"]

_BUILDING = threading.RLock()
# How many different runs of one graph are kept translated.
_RUNS_KEPT = 64


class _Translation:
    """What is run in the place of one combination of fetches, feeds and targets."""

    def __init__(self, fetches: list[Any], targets: list[Any], written: Written | None) -> None:
        self.fetches, self.targets = fetches, targets
        # Host functions live as long as this does.
        self.written = written


class _Translations:
    """The translations of one store of contexts; resumes with it, and holds no graph."""

    def __init__(self) -> None:
        self.found: dict[Any, _Translation] = {}

    def put(self, graph: Any, key: Any, translation: _Translation) -> None:
        """Keep a translation for as long as its graph is there."""
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
        super().__init__(session, _PATCHES, "graph")
        self._reader = _Reader()
        self._analysis = Analysis(session, GRAPH, self._reader.read)
        self._translations = session.persistent("tensorflow.translations", _Translations)

    def coverage(self) -> Sequence[Blind]:
        """What is not seen in graphs of sessions."""
        return [
            Blind("partial runs", "they are refused while tools are applied"),
            Blind(
                "CallableOptions",
                "what Session._make_callable_from_options made runs without Python",
            ),
            Blind("control outputs of ops", "Operation._control_outputs names hidden clones, too"),
            *(Blind(what, why) for what, why in self._blind.items()),
        ]

    def run(
        self,
        call: Any,
        owner: Any,
        options: Any,
        feeds: dict[Any, Any],
        fetches: list[Any],
        targets: list[Any],
        metadata: Any,
    ) -> Any:
        """A run of a session, given by outputs and ops of the C API."""
        session = self.session
        translation = self._translation(call, owner, feeds, fetches, targets)
        self._listener.listen(session)
        outermost = STATE.running == 0
        STATE.running += 1
        STATE.quiet += 1
        try:
            owner._extend_graph()
            result = call(owner, options, feeds, translation.fetches, translation.targets, metadata)
        except BaseException as error:
            session.raised(error)
            session.raise_pending()
            refused = refusal(error)
            if refused is not None:
                raise refused from error
            raise
        finally:
            STATE.running -= 1
            STATE.quiet -= 1
        session.raise_pending()
        if outermost:
            session.end_step()
        return result

    # Translation.

    def _translation(
        self, call: Any, owner: Any, feeds: dict[Any, Any], fetches: list[Any], targets: list[Any]
    ) -> _Translation:
        graph, session = owner.graph, self.session
        fetched = [(_op(graph, output.oper), output.index) for output in fetches]
        fed = sorted((_op(graph, output.oper).name, output.index) for output in feeds)
        run = [_op(graph, target) for target in targets]
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
            self._reader.bind(owner, call)
            try:
                found = self._translate(graph, fetched, set(fed), run, fetches, targets)
            finally:
                self._reader.bind(None, None)
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
        fetches: list[Any],
        targets: list[Any],
    ) -> _Translation:
        asked = [op for op, _ in fetched] + run
        runs = _needed(asked, fed)
        # Gradients read versions of what their forward ops see, also where those do not run.
        body = Body.of_graph(graph, _needed(asked, fed, with_forward=True), fed)
        rewriter = Rewriter(self.session, self._analysis, _definition_in(graph), self._note_blind)
        woven = Woven("session", body)
        library: list[Any] = []
        rewriter.add = library.append
        wired = {id(node): (list(node.inputs), len(node.controls)) for node in body.nodes}
        rewriter.weave_body(woven)
        weaver = woven.weaver
        seen = [weaver.final(_value(body, op, index, fed)) for op, index in fetched]
        roots = [*(value.node for value in seen), *map(body.node_of, run)]
        weaver.kept.settle({id(body.node_of(op)) for op in runs}, roots)
        rewriter.write_calls(woven)
        names = {op.name for op in runs}
        kept = [
            made
            for made in weaver.kept.nodes
            if names.issuperset(control for control in made.controls if isinstance(control, str))
        ]
        live = body.reached([*roots, *kept])
        changed = [
            node
            for node in body.nodes
            if id(node) in live
            and ((node.inputs, len(node.controls)) != wired[id(node)] or node.attrs)
        ]
        new = [node for node in weaver.new if id(node) in live]
        if not changed and not new:
            return _Translation(fetches, targets, None)
        hiding.prepare(graph)
        dirty = [node for node in dirty_nodes(body, changed) if id(node) in live]
        for node in dirty:
            if draws(node.op_type):
                self._note_blind(
                    f"the random sequence of {node.name!r}",
                    "the op depends on an edited value, so that it begins a sequence of its own",
                )
        written = rewriter.written
        cloned = clone(body, dirty, new, kept, library, self.session, written)
        new_fetches = [
            _output(cloned, value, old) for value, old in zip(seen, fetches, strict=True)
        ]
        new_targets = [(cloned.operations.get(op.name) or op)._c_op for op in run]
        return _Translation(new_fetches, new_targets + [op._c_op for op in cloned.kept], written)

    def _note_blind(self, what: str, why: str) -> None:
        self._blind[what] = why


def _op(graph: Any, c_op: Any) -> Any:
    return graph._get_operation_by_tf_operation(c_op)


def _output(cloned: Cloned, value: Value, original: Any) -> Any:
    tensor = cloned.tensors.get((value.node.name, value.slot))
    return tensor._as_tf_output() if tensor is not None else original


def _definition_in(graph: Any) -> Any:
    def definition(name: str) -> Any:
        function = graph._get_function(name)
        if function is None:
            raise UnsupportedError(f"The function {name!r} is not in the graph's library")
        return function.cached_definition

    return definition


def _needed(
    roots: Sequence[Any], fed: set[tuple[str, int]], with_forward: bool = False
) -> list[Any]:
    """The ops that a run needs, in the order of creation; fed tensors need nothing.

    Args:
        roots: What is fetched and run.
        fed: What is fed.
        with_forward: Whether to add the forward op of every gradient, with what it needs.
    """
    needed: dict[int, Any] = {}
    waiting = list(roots)
    found = records.Records.of(roots[0].graph) if roots and with_forward else None
    while waiting:
        op = waiting.pop()
        if op._id in needed:
            continue
        needed[op._id] = op
        waiting += op.control_inputs
        waiting += [t.op for t in op.inputs if (t.op.name, t.value_index) not in fed]
        if found is not None:
            # An op whose gradient function hands on what arrives owns no op.
            handing = (found.contributions().get((id(op), i), ()) for i in range(len(op.outputs)))
            for owner in (found.owner(op), *(owner for each in handing for owner, _ in each)):
                if owner is None:
                    continue
                # What arrives at an op, its own gradient may not read; a replacement of it may.
                arriving = [
                    part.op for each in owner.out_grads for part in records.components(each)
                ]
                waiting += [o for o in (owner.forward, *arriving) if o.graph is op.graph]
    return [needed[number] for number in sorted(needed)]


def _value(body: Body, op: Any, index: int, fed: set[tuple[str, int]]) -> Value:
    node = body.fed.get((op.name, index)) or body.node_of(op)
    assert isinstance(node, Node)
    return Value(node, index)


class _Reader:
    """Values of variables, read by a run of their own."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._call: Any = None

    def bind(self, owner: Any, call: Any) -> None:
        """Read through `owner` from now on; None ends it."""
        self._owner, self._call = owner, call

    def read(self, tensor: Any) -> Any:
        """The value of a tensor that is a variable's, or None."""
        op = tensor.op
        while op.type == "Identity":
            op = op.inputs[0].op
        if self._owner is None or op.type not in ("ReadVariableOp", "VariableV2", "Variable"):
            return None
        if op.type == "ReadVariableOp" and op.inputs[0].op.type != "VarHandleOp":
            return None
        try:
            self._owner._extend_graph()
            output = op.outputs[0]._as_tf_output()
            return self._call(self._owner, None, {}, [output], [], None)[0]
        except errors.FailedPreconditionError:
            return None  # It has no value yet.


class _Patches(Patches):
    """The methods of sessions that are replaced while any thread is attached."""

    def _install(self) -> None:
        owner = session_module.BaseSession
        for name, make in (
            ("_call_tf_sessionrun", _running),
            ("_call_tf_sessionprun", _running_partially),
        ):
            self._replace(owner, name, make(getattr(owner, name)))


_PATCHES = _Patches()


def _running(original: Any) -> Any:
    @functools.wraps(original)
    def _call_tf_sessionrun(
        self: Any,
        options: Any,
        feed_dict: Any,
        fetch_list: Any,
        target_list: Any,
        run_metadata: Any,
    ) -> Any:
        attachment = STATE.attachment
        if attachment is None or STATE.quiet or not attachment.session.enabled:
            return original(self, options, feed_dict, fetch_list, target_list, run_metadata)
        return attachment.graphs.run(
            original, self, options, feed_dict, fetch_list, target_list, run_metadata
        )

    return _call_tf_sessionrun


def _running_partially(original: Any) -> Any:
    @functools.wraps(original)
    def _call_tf_sessionprun(self: Any, handle: Any, feed_dict: Any, fetch_list: Any) -> Any:
        attachment = STATE.attachment
        if attachment is not None and not STATE.quiet and attachment.session.enabled:
            raise UnsupportedError(
                "A partial run was continued while tools are applied",
                fix="Call Session.run, or run it inside amanda.disabled()",
            )
        return original(self, handle, feed_dict, fetch_list)

    return _call_tf_sessionprun
