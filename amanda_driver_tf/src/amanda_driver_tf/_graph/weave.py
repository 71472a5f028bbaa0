"""`Weaver`: the plans of a body's ops turned into new nodes and new wiring.

Owns the order in which nodes are woven, and what is done at each. What is inserted at an op,
`insertions` says; which version of a value a reader gets, `reading`; what happens at gradients,
`gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from amanda_core.errors import UnsupportedError
from amanda_driver_tf._graph.analysis import (
    Analysis,
    OpPlans,
    is_accumulation,
    is_operator,
    runs_functions,
)
from amanda_driver_tf._graph.body import BACK, Body, Node, Value
from amanda_driver_tf._graph.conditions import operands
from amanda_driver_tf._graph.gradients import Gradients, Reader
from amanda_driver_tf._graph.insertions import Insertions
from amanda_driver_tf._graph.jacobians import no_gradient
from amanda_driver_tf._graph.kept import Kept
from amanda_driver_tf._graph.lost import unread_of
from amanda_driver_tf._graph.nodes import New
from amanda_driver_tf._graph.observers import Observers
from amanda_driver_tf._graph.old_loops import OldLoops
from amanda_driver_tf._graph.reading import Reading
from amanda_driver_tf._graph.records import Record, Records, children_of
from amanda_driver_tf._graph.routines import (
    Layout,
    replaced,
)
from amanda_driver_tf._graph.second import refuse_second
from amanda_driver_tf._graph.versions import (
    Differentiated,
    Foreign,
    Seen,
)

__all__ = ["Weaver"]


class Weaver:
    """Weaves the plans of one body.

    Args:
        body: The body; it is changed.
        analysis: Plans of its ops.
        foreign: The forward program of a body of gradients.
        call: Called for each node that runs functions, to have these woven.
        unpaired: Whether somebody who calls this computes gradients that nobody has noted.
        inside: Ids of ops whose gradients are computed in functions that this body runs.
        differentiated: Whether gradients go through the call of this body.
        refused: Why edits cannot stand in this body: routines look, and must not edit.

    Attributes:
        new: The new nodes.
        kept: What must run though nothing reads it.
        changed: Whether anything was inserted or rewired.
        edited: Whether any of that may change a value.
        observers: What only looks.
        named: Ops with a gradient in this body of which only the pairing is known.
        differentiated_inside: Ids of ops whose gradients are computed in functions that this body
            runs.
        is_differentiated: Whether some gradient of this body is computed.
        unheard: What the tools asked for and do not get in this body -> why.
    """

    def __init__(
        self,
        body: Body,
        analysis: Analysis,
        foreign: Foreign | None = None,
        call: Callable[[Weaver, Node], None] | None = None,
        unpaired: bool = False,
        inside: Collection[int] = (),
        differentiated: bool = False,
        refused: UnsupportedError | None = None,
    ) -> None:
        self.body = body
        self.refused = refused
        self.new: list[New] = []
        self.kept = Kept(body)
        self.changed = False
        self.edited = False
        self.observers = Observers(self)
        self.analysis = analysis
        self.foreign = foreign or Foreign()
        self._call = call
        self.records = Records.of(body.graph)
        #: Whether there are gradients of this body that nobody has noted: no edit is safe then.
        self.unpaired = unpaired or bool(self.records and self.records.has_unpaired())
        self.named = {
            owner.forward.name
            for owner in map(self.owner, (node.op for node in body.nodes))
            if owner is not None and owner.is_named
        }
        self.differentiated_inside = inside
        self._visible: dict[Value, Value] = {}
        self._seen: dict[int, Seen] = {}
        self._done: set[int] = set()
        self._is_called_differentiated = differentiated
        self.is_differentiated = (
            differentiated or self.records is not None or bool(children_of(body.graph))
        )
        self.unheard: dict[str, str] = {}
        self.insertions = Insertions(self)
        self.reading = Reading(self)
        self.loops = OldLoops(self)
        self.gradients = Gradients(self)

    # Results.

    def weave(self) -> None:
        """Weave all nodes, and what the body returns."""
        is_function = self.body.fdef is not None
        if is_function:
            self.body.running = self.body.reached(self.body.roots())
        for node in self.body.nodes:
            self.visit(node)
        for name, value in self.body.results.items():
            new = self.final(value)
            if new != value:
                self.body.results[name] = new
                self.changed = True
        if is_function:
            self.kept.settle(self.body.running, self.body.roots())
        self.loops.settle(self.insertions.beside)
        self.gradients.refuse_unread()

    def refuse_second(self, body: Body) -> None:
        """Refuse that `body` differentiates gradients of this one that other ops compute."""
        refuse_second(self.gradients.anew(), body)

    def has_new_gradients(self) -> bool:
        """Return True if this body has gradients that TensorFlow did not make."""
        return bool(self.gradients.anew())

    def seen(self, op: Any) -> Seen | None:
        """Return what a forward op saw and made; None if it is not in this body."""
        known = self._seen.get(id(op))
        if known is None:
            node = self.body.node_of(op)
            known = Seen(op, node.inputs, node.outputs()) if node is not None else None
        return known

    def final(self, value: Value) -> Value:
        """Return what is handed out where a value is fetched or returned."""
        return self.reading.read(value)

    def visible(self, value: Value) -> Value:
        """Return what an ordinary reader of a value gets."""
        return self._visible.get(value, value)

    def differentiates(self, op: Any) -> bool:
        """Return True if gradients go through an op that runs functions."""
        graphs = (self.body.graph, *children_of(self.body.graph))
        noted = [found for found in map(Records.of, graphs) if found is not None]
        return self._is_called_differentiated or any(found.of_op(op) for found in noted)

    def add(self, node: New) -> list[Value]:
        """Put a new node in."""
        self.new.append(node)
        self.changed = self.edited = True
        return node.outputs()

    # Nodes.

    def visit(self, node: Any) -> None:
        """Weave a node, and what it reads before it; once."""
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
            self._weave_node(current)

    def _weave_node(self, node: Node) -> None:
        owner = rerun_by = self.owner(node.op)
        if owner is not None and not self.analysis.is_backward(node.op):
            owner = None  # Run again by the gradient: a forward op like any other.
        with self.observers.collecting() as observers:
            if is_accumulation(node.op, self.records) and (
                owner is None or self.gradients.is_summed_within(node, owner)
            ):
                inputs = self.gradients.accumulated(node)
            elif owner is not None:
                inputs = [
                    self.reading.in_gradient(value, owner, Reader(node, slot))
                    for slot, value in enumerate(node.inputs)
                ]
            else:
                inputs = [self.reading.again(value, node, rerun_by) for value in node.inputs]
        self.observers.hold(node, observers)
        self.loops.note(node, inputs)
        if not is_operator(node.op_type):
            self._wire(node, inputs)
            if self._call is not None:
                self._call(self, node)
            return
        if self._call is not None and runs_functions(node.op_type):
            self._call(self, node)
        plans = self.analysis.plans_of(node.op)
        if plans is None or not (plans.before or plans.after):
            self._wire(node, inputs)
        elif plans.context.is_backward():
            self._backward(node, plans, inputs)
        else:
            self._forward(node, plans, inputs)
        if plans is not None and not (plans.before or plans.after):
            self.insertions.refuse_unread(node, plans)

    def _wire(self, node: Node, inputs: list[Value]) -> None:
        if inputs != node.inputs:
            node.inputs = inputs
            self.changed = True

    def owner(self, op: Any) -> Record | None:
        """Return the gradient whose function made an op; None for other ops."""
        return self.records.owner(op) if self.records is not None else None

    # Forward.

    def _forward(self, node: Node, plans: OpPlans, inputs: list[Value]) -> None:
        self.insertions.refuse_unread(node, plans)
        layout = self.insertions.layout_of(node)
        outputs = node.outputs()
        seen = Seen(node.op, inputs, outputs)
        seen.inputs = self.insertions.steps(
            f"{node.name}/before", plans.before.steps, inputs, layout, node, seen.before
        )
        self._wire(node, operands(node, seen.inputs, partial(self.insertions.add_beside, node)))
        if plans.before.replacement is not None:
            step = plans.before.replacement
            self.observers.include(step)
            flat = replaced(step, layout, node.dtypes, self.insertions.shapes_wanted(node))
            unread = unread_of(node.op, self.body)
            if unread and plans.aligned_before.replacement is None:
                flat = no_gradient(flat, unread, step)
            everything = list(range(len(seen.inputs)))
            seen.replacement = Differentiated(flat, seen.inputs, everything, step)
            seen.outputs = self.insertions.insert(
                f"{node.name}/replacement", flat, seen.inputs, node.dtypes, step
            )
            outputs = seen.outputs
            if outputs:
                outputs[0].node.controls += node.controls
        after = self.insertions.steps(
            f"{node.name}/after",
            plans.after.steps,
            outputs,
            Layout([None] * len(outputs)),
            node,
            seen.after,
            behind=True,
        )
        for original, new in zip(node.outputs(), after, strict=True):
            if new != original:
                self._visible[original] = new
        self._seen[id(node.op)] = seen

    # Backward ops.

    def _backward(self, node: Node, plans: OpPlans, inputs: list[Value]) -> None:
        layout = Layout([None] * len(inputs))
        inputs = self.insertions.steps(
            f"{node.name}/before", plans.before.steps, inputs, layout, node
        )
        self._wire(node, inputs)
        outputs = node.outputs()
        if plans.before.replacement is not None:
            step = plans.before.replacement
            self.observers.include(step)
            flat = replaced(step, layout, node.dtypes)
            outputs = self.insertions.insert(
                f"{node.name}/replacement", flat, inputs, node.dtypes, step
            )
            if outputs:
                outputs[0].node.controls += node.controls
        layout = Layout([None] * len(outputs))
        after = self.insertions.steps(
            f"{node.name}/after", plans.after.steps, outputs, layout, node, behind=True
        )
        changed = [(old, new) for old, new in zip(node.outputs(), after, strict=True) if new != old]
        self._visible.update(changed)
        self._seen[id(node.op)] = Seen(node.op, inputs, outputs)
