"""`BodyRewriter`: rewrites one body by inserting the plans of its ops.

Owns the order in which nodes are rewritten, and the steps for each node. `insertions` decides what
is inserted at an op, `reader_versions` which version of a value each reader gets, and
`gradient_versions` what happens at gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from amanda_driver_tf.gradients.graphs.derivatives import Derivatives
from amanda_driver_tf.gradients.graphs.gradient_versions import GradientVersions, Reader
from amanda_driver_tf.gradients.graphs.op_versions import OpVersions
from amanda_driver_tf.gradients.graphs.reader_versions import ReaderVersions
from amanda_driver_tf.gradients.graphs.second_order import refuse_second
from amanda_driver_tf.gradients.graphs.unreachable_gradients import unread_of
from amanda_driver_tf.graphs.analysis import (
    Analysis,
    OpPlans,
    is_accumulation,
    is_operator,
    runs_functions,
)
from amanda_driver_tf.graphs.body import BACK, Body, Node, Value
from amanda_driver_tf.graphs.function_graphs import children_of
from amanda_driver_tf.graphs.pruning import find_dropped
from amanda_driver_tf.graphs.records import Record, Records
from amanda_driver_tf.insertion.body_edits import BodyEdits, Surroundings
from amanda_driver_tf.insertion.frame_placement import keep_in_frames
from amanda_driver_tf.insertion.jacobians import refuse_gradients
from amanda_driver_tf.insertion.loop_conditions import operands
from amanda_driver_tf.insertion.observers import Observers
from amanda_driver_tf.insertion.op_values import Differentiated, OpValues
from amanda_driver_tf.insertion.step_functions import Layout, replacement_function
from amanda_driver_tf.rewriting.insertions import Insertions
from amanda_driver_tf.rewriting.layer_values import LayerValues

__all__ = ["BodyRewriter"]


class BodyRewriter:
    """Inserts the plans of one body.

    Args:
        body: The body; it is changed in place.
        analysis: Plans of its ops.
        around: Facts that come from its callers.
        call: Called for each node that calls functions, to rewrite these.

    Attributes:
        edits: The changes made to the body so far.
    """

    def __init__(
        self,
        body: Body,
        analysis: Analysis,
        around: Surroundings,
        call: Callable[[Node], None],
    ) -> None:
        self.edits = edits = BodyEdits(body, analysis, around, self.visit)
        self._body, self._call = body, call
        self._done: set[int] = set()
        self._observers = Observers(edits)
        versions = OpVersions(edits)
        derivatives = Derivatives(edits, self._observers, self._returned)
        self._gradients = GradientVersions(
            edits, self._observers, versions, derivatives, self._returned
        )
        self._readers = ReaderVersions(edits, versions, self._gradients)
        self._insertions = Insertions(edits, self._observers, self._gradients)
        self._layers = LayerValues(edits, self._observers, self._insertions)

    def _returned(self, value: Value, owner: Record) -> Value:
        """Return the version of a value that the gradient function of an op returns."""
        return self._readers.in_gradient(value, owner)

    # Results.

    def rewrite(self) -> None:
        """Rewrite all nodes, and the results of the body."""
        is_function = self._body.fdef is not None
        if is_function:
            find_dropped(self._body, self._body.roots())
        for node in self._body.arguments:
            self._layers.insert(node)
        for node in self._body.nodes:
            self.visit(node)
        for name, value in self._body.results.items():
            new = self.final(value)
            if new != value:
                self._body.results[name] = new
                self.edits.changed = True
        if is_function:
            self.edits.kept.settle(self._body.running, self._body.roots())
        keep_in_frames(self.edits)
        self._gradients.refuse_unread()

    def refuse_second(self, body: Body) -> None:
        """Refuse to differentiate gradients in `body` that new nodes compute."""
        refuse_second(self._gradients.recomputed(), body)

    def has_new_gradients(self) -> bool:
        """Return True if new nodes compute any gradient of this body."""
        return bool(self._gradients.recomputed())

    def final(self, value: Value) -> Value:
        """Return the version of a value that is fetched or returned."""
        return self._readers.read(value)

    def differentiates(self, op: Any) -> bool:
        """Return True if gradients flow through an op that calls functions."""
        graphs = (self._body.graph, *children_of(self._body.graph))
        noted = [found for found in map(Records.of, graphs) if found is not None]
        return self.edits.around.is_differentiated or any(found.of_op(op) for found in noted)

    # Nodes.

    def visit(self, node: Any) -> None:
        """Rewrite a node once, after the nodes that it reads."""
        stack = [node]
        while stack:
            current = stack[-1]
            if not isinstance(current, Node) or current.is_argument or id(current) in self._done:
                stack.pop()
                continue
            waiting = [
                value.node
                for value in current.inputs
                if isinstance(value.node, Node)
                and not value.node.is_argument
                and id(value.node) not in self._done
                and value.node.op_type not in BACK
            ]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            self._done.add(id(current))
            self._rewrite_node(current)
            self._layers.insert(current)

    def _rewrite_node(self, node: Node) -> None:
        owner = rerun_by = self.edits.owner(node.op)
        if owner is not None and not self.edits.analysis.is_backward(node.op):
            owner = None  # A gradient function reruns it: a forward op like any other.
        with self._observers.collecting() as observers:
            if is_accumulation(node.op, self.edits.records) and (
                owner is None or self._gradients.is_summed_within(node, owner)
            ):
                inputs = self._gradients.accumulated(node)
            elif owner is not None:
                inputs = [
                    self._readers.in_gradient(value, owner, Reader(node, slot))
                    for slot, value in enumerate(node.inputs)
                ]
            else:
                inputs = [self._readers.again(value, node, rerun_by) for value in node.inputs]
        self._observers.hold(node, observers)
        if not is_operator(node.op_type):
            self.edits.wire(node, inputs)
            self._call(node)
            return
        if runs_functions(node.op_type):
            self._call(node)
        plans = self.edits.analysis.plans_of(node.op)
        if plans is None or not (plans.before or plans.after):
            self.edits.wire(node, inputs)
        elif plans.context.is_backward():
            self._backward(node, plans, inputs)
        else:
            self._forward(node, plans, inputs)
        if plans is not None and not (plans.before or plans.after):
            self._insertions.refuse_unread(node, plans)

    # Forward.

    def _forward(self, node: Node, plans: OpPlans, inputs: list[Value]) -> None:
        self._insertions.refuse_unread(node, plans)
        layout = self._insertions.layout_of(node)
        outputs = node.outputs()
        seen = OpValues(node.op, inputs, outputs)
        seen.inputs = self._insertions.steps(
            f"{node.name}/before", plans.before.steps, inputs, layout, node, seen.before
        )
        self.edits.wire(node, operands(node, seen.inputs, partial(self.edits.add, node=node)))
        if plans.before.replacement is not None:
            step = plans.before.replacement
            self._observers.include(step)
            flat = replacement_function(
                step, layout, node.dtypes, self._insertions.shapes_wanted(node)
            )
            unread = unread_of(node.op, self._body)
            if unread and plans.aligned_before.replacement is None:
                flat = refuse_gradients(flat, unread, step)
            everything = list(range(len(seen.inputs)))
            seen.replacement = Differentiated(flat, seen.inputs, everything, step)
            seen.outputs = self.edits.insert(
                f"{node.name}/replacement", flat, seen.inputs, node.dtypes, step
            )
            outputs = seen.outputs
            if outputs:
                outputs[0].node.controls += node.controls
        after = self._insertions.steps(
            f"{node.name}/after",
            plans.after.steps,
            outputs,
            Layout([None] * len(outputs)),
            node,
            seen.after,
            after=True,
        )
        for original, new in zip(node.outputs(), after, strict=True):
            self.edits.show(original, new)
        self.edits.note_seen(seen)

    # Backward ops.

    def _backward(self, node: Node, plans: OpPlans, inputs: list[Value]) -> None:
        layout = Layout([None] * len(inputs))
        inputs = self._insertions.steps(
            f"{node.name}/before", plans.before.steps, inputs, layout, node
        )
        self.edits.wire(node, inputs)
        outputs = node.outputs()
        if plans.before.replacement is not None:
            step = plans.before.replacement
            self._observers.include(step)
            flat = replacement_function(step, layout, node.dtypes)
            outputs = self.edits.insert(f"{node.name}/replacement", flat, inputs, node.dtypes, step)
            if outputs:
                outputs[0].node.controls += node.controls
        layout = Layout([None] * len(outputs))
        after = self._insertions.steps(
            f"{node.name}/after", plans.after.steps, outputs, layout, node, after=True
        )
        for original, new in zip(node.outputs(), after, strict=True):
            self.edits.show(original, new)
        self.edits.note_seen(OpValues(node.op, inputs, outputs))
