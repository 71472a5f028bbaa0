"""`FunctionRewriter`: rewrites functions together with the functions that they call.

Owns the traversal of calls, branches and loops, which gradient belongs to which call, and the names
of the functions written. The module is a little over 400 lines because it is one traversal.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.core.framework import types_pb2

from amanda_core.driver_kit import Session
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.analysis import Analysis, runs_functions
from amanda_driver_tf.graphs.body import Body, Node, Value
from amanda_driver_tf.graphs.control_flow_contexts import is_differentiated_elsewhere
from amanda_driver_tf.graphs.function_graphs import graph_of
from amanda_driver_tf.graphs.records import Record, Records, differentiated_inside
from amanda_driver_tf.insertion.body_edits import Surroundings
from amanda_driver_tf.insertion.function_def_writing import (
    Written,
    add_function,
    attr_func,
    attr_types,
    write_function,
)
from amanda_driver_tf.insertion.host_functions import Listener
from amanda_driver_tf.insertion.nodes import Argument
from amanda_driver_tf.insertion.op_values import ForwardProgram
from amanda_driver_tf.insertion.tensor_lists import dummy, empty_list, pushed
from amanda_driver_tf.rewriting.body_rewriting import BodyRewriter
from amanda_driver_tf.rewriting.insertions import DIFFERENTIATED_ELSEWHERE, NEW_CONTROL_FLOW
from amanda_driver_tf.rewriting.links import Link
from amanda_driver_tf.rewriting.rewritten_function import RewrittenFunction
from amanda_driver_tf.rewriting.xla import (
    compile_alone,
    compiled_call,
    is_compiled,
    needs_xla,
    release,
)
from amanda_driver_tf.tensorflow_internals.objects import operation_number

__all__ = ["Call", "FunctionRewriter", "with_names_of_program"]

# The attributes of an op that name the functions it calls; the body of a loop comes first.
_FUNCTIONS = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "While": ("body", "cond"),
    "StatelessWhile": ("body", "cond"),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
    # AutoGraph compiles a loop over a data set to these.
    "ReduceDataset": ("f",),
    "ScanDataset": ("f",),
}
_OVER_DATA = ("ReduceDataset", "ScanDataset")
_STATEFUL = {
    "PartitionedCall": "StatefulPartitionedCall",
    "StatelessWhile": "While",
    "StatelessIf": "If",
    "StatelessCase": "Case",
}
_LOOPS = ("While", "StatelessWhile")
_NUMBERS = itertools.count(1)
#: How the names of written functions begin.
_WRITTEN = "amanda_"
_PREFIX = re.compile(r"\bamanda_\d+_")


def with_names_of_program(message: str) -> str:
    """Return a message with the names of the functions that were rewritten."""
    return _PREFIX.sub("", message)


@dataclass(frozen=True)
class Call:
    """Facts about a function that come from the node that calls it.

    Attributes:
        outer: The function that contains the node.
        forward: The forward function, if this is a gradient function.
        looped: Whether both are bodies of loops.
        analysis: The plans, if not those of the rewriter.
        differentiated: Whether gradients flow through the call.
    """

    outer: RewrittenFunction | None = None
    forward: RewrittenFunction | None = None
    looped: bool = False
    analysis: Analysis | None = None
    differentiated: bool = False


class FunctionRewriter:
    """Rewrites and writes functions for one session and epoch.

    Args:
        session: The session.
        analysis: Plans of ops.
        definition: Returns the FunctionDef of a name.
        add_gap: Called with what is not covered and why.

    Attributes:
        written: What must stay alive as long as the written functions.
        add: Registers a FunctionDef with whatever runs it.
        refused: Why values cannot be edited. If set, routines only observe.
    """

    def __init__(self, session: Session, analysis: Analysis, definition: Any, add_gap: Any) -> None:
        self.session = session
        self.written = Written(Listener.of(session))
        self.add: Callable[[Any], object] = add_function
        self.refused: UnsupportedError | None = None
        self._analysis, self._definition, self._add_gap = analysis, definition, add_gap
        self._stack: list[str] = []

    def rewrite(self, name: str, call: Call) -> RewrittenFunction | None:
        """Rewrite a function and all functions it calls; return None if it cannot be read."""
        if name.startswith(_WRITTEN):
            return None  # A graph that pfor has made calls it, with its routines.
        if name in self._stack:
            self._add_gap("recursive functions", f"{name} calls itself")
            return None
        outer = call.outer
        try:
            body = Body.of_function(
                self._definition(name),
                graph_of(name, outer.body.graph if outer is not None else None),
            )
        except UnsupportedError as error:
            self._add_gap("functions used as op types", str(error))
            return None
        rewritten = RewrittenFunction(name, body)
        self._stack.append(name)
        try:
            self.rewrite_body(rewritten, call)
        finally:
            self._stack.pop()
        return rewritten

    def rewrite_body(self, rewritten: RewrittenFunction, call: Call) -> None:
        """Rewrite a body that was read."""
        link = Link(call.forward, rewritten, call.looped) if call.forward is not None else None

        def run_functions(node: Node) -> None:
            self._call(rewritten, node, call, link)

        around = Surroundings(
            forward_program=link or ForwardProgram(),
            unpaired=call.outer is not None and call.outer.edits.unpaired,
            followed=call.outer is not None and call.outer.edits.followed,
            differentiated_inside=self._differentiated_inside(rewritten.body.graph),
            is_differentiated=call.differentiated,
            refused=self.refused,
        )
        rewritten.rewriter = BodyRewriter(
            rewritten.body, call.analysis or self._analysis, around, run_functions
        )
        rewritten.rewriter.rewrite()
        for what, why in rewritten.edits.unmet_requests.items():
            self._add_gap(what, why)

    def _differentiated_inside(self, outer: Any) -> set[int]:
        """Return the ids of a graph's ops that are differentiated in functions that it calls."""
        candidates = differentiated_inside(outer)
        found: set[int] = set()
        waiting, seen = [outer] if candidates else [], {id(outer)}
        while waiting:
            for name in _called(waiting.pop()):
                graph = graph_of(name, outer)
                if graph is None:
                    return candidates  # The function's graph is gone, so assume the worst.
                if id(graph) in seen:
                    continue
                seen.add(id(graph))
                waiting.append(graph)
                records = Records.of(graph)
                made = records.records if records is not None else ()
                found.update(
                    operation_number(each.forward) for each in made if each.forward.graph is outer
                )
        return found

    # Nodes that call functions.

    def _call(
        self, rewritten: RewrittenFunction, node: Node, call: Call, link: Link | None
    ) -> None:
        attributes = _FUNCTIONS.get(node.op_type)
        if attributes is None:
            if runs_functions(node.op_type):
                self._add_gap(f"functions inside {node.op_type}", "it runs them by its own rules")
            return
        names = _function_names(self._attr_of(rewritten, node), attributes)
        ahead = self._forward_of(rewritten, node, call.forward)
        looped = node.op_type in _LOOPS
        differentiated = rewritten.rewriter.differentiates(node.op)
        inner: list[RewrittenFunction | None] = []
        self._analysis.calls.append(node.op)
        for position, name in enumerate(names):
            # The condition of a reverse loop reads no forward value.
            source = ahead[1][position] if ahead is not None and position < len(ahead[1]) else None
            if looped and position:
                source = None
            inner.append(
                self.rewrite(name, Call(rewritten, source, looped, call.analysis, differentiated))
            )
        self._analysis.calls.pop()
        rewritten.calls[id(node.op)] = (node, inner)
        if ahead is not None:
            self._supply(rewritten, node, inner, ahead, link)

    def _attr_of(self, rewritten: RewrittenFunction, node: Node) -> Any:
        if rewritten.body.fdef is None:
            return node.op.node_def.attr
        return next(d for d in rewritten.body.fdef.node_def if d.name == node.name).attr

    def _forward_of(
        self, rewritten: RewrittenFunction, node: Node, forward: RewrittenFunction | None
    ) -> tuple[Record, list[RewrittenFunction | None], RewrittenFunction] | None:
        """Find the forward call of a gradient's call.

        Returns:
            The gradient, the rewritten functions of its op, and the function that contains the op.
        """
        records = Records.of(rewritten.body.graph)
        owner = records.owner(node.op) if records is not None else None
        if owner is None:
            return None
        for place in (rewritten, forward):
            if place is not None:
                found = place.functions_of(owner.forward)
                if found:
                    return owner, found, place
        return None

    def _supply(
        self,
        rewritten: RewrittenFunction,
        node: Node,
        inner: Sequence[RewrittenFunction | None],
        ahead: tuple[Record, list[RewrittenFunction | None], RewrittenFunction],
        link: Link | None,
    ) -> None:
        """Pass to a gradient's call the versions that its functions need."""
        owner, _, place = ahead
        forward_node = place.body.node_of(owner.forward)
        assert forward_node is not None
        own = [list(function.arguments) if function is not None else [] for function in inner]
        for function in inner:
            if function is not None:
                function.arguments.clear()
        for position, function in enumerate(inner):
            if function is None:
                continue
            for argument, value in zip(own[position], function.demands, strict=True):
                result = self._export_values(place, forward_node, position, value)
                if place is not rewritten:
                    assert link is not None
                    result = link.bring(result)
                elif is_differentiated_elsewhere(owner):
                    raise UnsupportedError(
                        DIFFERENTIATED_ELSEWHERE,
                        where=f"the call {forward_node.name!r}",
                        fix=NEW_CONTROL_FLOW,
                    )
                node.inputs.append(result)
                # All functions of one op take the same arguments, in the order of the op's inputs.
                for other in inner:
                    if other is function:
                        other.arguments.append(argument)
                    elif other is not None:
                        other.arguments.append(Argument("version", argument.dtypes[0]))
                if node.op_type in _LOOPS:
                    node.dtypes = (*node.dtypes, argument.dtypes[0])

    def _export_values(
        self, place: RewrittenFunction, node: Node, position: int, value: Value
    ) -> Value:
        """Make a value inside a function available as an output of `node`, which calls the
        function.
        """
        functions = place.functions_of(node.op)
        function = functions[position]
        assert function is not None
        known = function.exported.get(value)
        if known is not None:
            return Value(node, known)
        dtype = value.base
        edits = place.edits
        if node.op_type in _LOOPS:
            made = empty_list(dtype)
            for each in made:
                edits.add(each)
            node.inputs.append(Value(made[-1], 0))
            argument = Argument("version", types_pb2.DT_VARIANT)
            function.arguments.append(argument)
            push = pushed(Value(argument, 0), value)
            function.edits.add(push)
            condition = functions[1]
            assert condition is not None
            condition.arguments.append(Argument("version", types_pb2.DT_VARIANT))
            condition.edits.changed = True
            dtype, result = types_pb2.DT_VARIANT, Value(push, 0)
        else:
            result = value
            for other in functions:
                if other is not None and other is not function:
                    made = dummy(dtype)
                    for each in made:
                        other.edits.add(each)
                    other.results.append(Value(made[-1], 0))
        function.results.append(result)
        function.exported[value] = len(node.dtypes)
        node.dtypes = (*node.dtypes, dtype)
        edits.changed = True
        return Value(node, len(node.dtypes) - 1)

    # Writing.

    def write(self, rewritten: RewrittenFunction, released: bool = False) -> str | None:
        """Register a rewritten function with TensorFlow.

        Args:
            rewritten: The function.
            released: Whether XLA should compile it but cannot, since Python runs in the function or
                beside it.

        Returns:
            The function's name; None if nothing was changed.
        """
        runs_python = rewritten.runs_python()
        released = released or (runs_python and is_compiled(rewritten.body.fdef.attr))
        if released:
            self._say_released()
        self.write_calls(rewritten, released)
        alone = []
        if released or runs_python:
            alone = [node for node in rewritten.body.nodes if needs_xla(node, released)]
        edits = rewritten.edits
        if not (edits.changed or rewritten.arguments or rewritten.results or alone):
            return None
        edits.kept.settle_passed_on(rewritten.results)
        name = f"{_WRITTEN}{next(_NUMBERS)}_{rewritten.name}"
        self.written.has_hosts = False
        fdef = write_function(
            rewritten.body,
            name,
            edits.new,
            [*edits.kept.nodes, *edits.kept.awaited],
            rewritten.arguments,
            rewritten.results,
            self.written,
        )
        if released:
            release(fdef.attr)
        for function in compile_alone(fdef, alone):
            self.add(function)
            self.written.names.append(function.signature.name)
        self.add(fdef)
        self.written.names.append(name)
        return name

    def write_calls(self, rewritten: RewrittenFunction, released: bool = False) -> None:
        """Write the functions that a rewritten body calls, and make the body call these.

        Args:
            rewritten: The body.
            released: Whether XLA should compile the body but cannot.
        """
        for place in (rewritten.rewriter, rewritten.edits.around.forward_program):
            place.refuse_second(rewritten.body)
        for node, functions in rewritten.calls.values():
            attributes = self._attr_of(rewritten, node)
            run = [f for f in functions if f is not None]
            runs_python = any(f.runs_python() for f in run)
            is_call = node.op_type.endswith("Call")
            compiled = released
            if is_call:
                compiled = released or is_compiled(attributes)
                if compiled and (released or runs_python):
                    node.attrs.update(compiled_call(not runs_python))
                    rewritten.edits.changed = True
            inner = compiled and (runs_python or not is_call)
            written = [self.write(f, inner) if f is not None else None for f in functions]
            if any(written):
                rewritten.edits.changed = True
                if any(f.edits.kept.nodes or f.edits.kept.awaited for f in run):
                    rewritten.edits.kept.settle_call(node)
                self._replace_functions(node, attributes, written)
                if runs_python:
                    node.op_type = _STATEFUL.get(node.op_type, node.op_type)

    def _replace_functions(
        self, node: Node, attributes: Any, written: Sequence[str | None]
    ) -> None:
        """Make a node call functions that were written; None for one that it calls as before."""
        names = _FUNCTIONS[node.op_type]
        old = _function_names(attributes, names)
        new = [name or kept for name, kept in zip(written, old, strict=True)]
        if names == ("branches",):
            value = type(attributes["branches"])()
            for name in new:
                value.list.func.add().name = name
            node.attrs["branches"] = value
        else:
            for attribute, name in zip(names, new, strict=True):
                node.attrs[attribute] = attr_func(name)
        self._retype(node)

    def _say_released(self) -> None:
        self.session.warn_once(
            "A function that XLA should compile runs without XLA, since a tool's routine runs "
            "in it as Python. Mark the routine with @amanda.staged to keep XLA."
        )

    def _retype(self, node: Node) -> None:
        if node.op_type in _OVER_DATA:
            return  # These are not differentiated, so they get no new inputs or outputs.
        plain = [dtype % 100 for dtype in node.dtypes]
        if node.op_type in _LOOPS:
            node.attrs["T"] = attr_types(plain)
        else:
            skip = 0 if node.op_type.endswith("Call") else 1
            node.attrs["Tin"] = attr_types([v.dtype % 100 for v in node.inputs[skip:]])
            node.attrs["Tout"] = attr_types(plain)
        if not node.op_type.endswith("Call"):
            # The attribute is optional and would not match the new number of outputs.
            value = type(next(iter(node.attrs.values())))()
            value.list.SetInParent()
            node.attrs["output_shapes"] = value


def _called(graph: Any) -> Iterator[str]:
    """Iterate over the names of the functions that the ops of a graph call."""
    for op in graph.get_operations():
        attributes = _FUNCTIONS.get(op.type)
        if attributes is not None:
            yield from _function_names(op.node_def.attr, attributes)


def _function_names(attributes: Any, names: Sequence[str]) -> list[str]:
    if tuple(names) == ("branches",):
        return [function.name for function in attributes["branches"].list.func]
    return [attributes[name].func.name for name in names]
