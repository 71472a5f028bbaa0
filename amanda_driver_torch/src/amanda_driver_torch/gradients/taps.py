"""Aligned gradients of an op's inputs: those that it gives to them, before other ops' are added.

Owns how their routines are attached to the autograd graph: by hooks on the op's nodes, or by
identity nodes before the op where hooks do not suffice. Those of outputs are in `output_taps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from amanda_core.driver_kit import Plan, Step
from amanda_core.interface import UnsupportedError
from amanda_driver_torch.gradients.backward import Backward
from amanda_driver_torch.gradients.driver_nodes import tap
from amanda_driver_torch.gradients.dry_run import readable
from amanda_driver_torch.gradients.gradient_functions import (
    GradientFunction,
    concerns,
    gradient_function,
    requested_together,
)
from amanda_driver_torch.gradients.gradient_hooks import (
    in_dtypes,
    posthook,
    summing_hooks,
    with_shapes,
)
from amanda_driver_torch.gradients.gradient_nodes import (
    GradientNode,
    Result,
    casts_of_leaves,
    contributors,
    find_gradient_node,
    group_nodes,
)
from amanda_driver_torch.gradients.node_hooks import Token
from amanda_driver_torch.gradients.nodes import (
    Edge,
    Place,
    Slot,
    differentiable,
    edge_of,
    new_nodes,
    placed,
    routes,
    taken,
)
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.gradients.output_taps import region_of
from amanda_driver_torch.threads.state import AFTER_BACKWARD, AFTER_FORWARD
from amanda_driver_torch.torch_internals.internals import autocast_enabled, next_sequence
from amanda_driver_torch.torch_internals.tensor_attributes import is_nested_strided, shape_of

__all__ = ["Taps"]


class NodeGradients(NamedTuple):
    """A node that computes the gradients of several inputs.

    Attributes:
        hook: Runs all steps on results of the node; see `posthook`.
        steps: The steps that need any of these gradients.
        route: The path to the node; see `nodes.routes`.
        slots: The inputs.
        results: For each input, the result of the node that is its gradient.
    """

    hook: Callable[..., Any]
    steps: list[Step]
    route: list[Place]
    slots: list[Slot]
    results: list[Result]


class Taps:
    """The aligned gradient routines of one execution."""

    def __init__(self, backward: Backward, call: OperatorCall) -> None:
        self._backward, self._call = backward, call
        self._context = call.context
        #: id of an identity -> the identity (held so that the id is not reused) and its input.
        self._tapped: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._done = False
        self._edges: dict[Slot, Edge] = {}
        #: Inputs whose edges and shapes are not read yet.
        self._inputs: dict[Slot, torch.Tensor] = {}
        #: Shapes before the op ran, since ops like `squeeze_` change the shape of their input.
        self._shapes: dict[Slot, torch.Size] = {}
        #: Groups of inputs that go through identities, and the functions of their gradients.
        self._fronts: list[tuple[list[Slot], GradientFunction]] = []
        #: Groups of inputs whose gradients are read at a node instead, and the node.
        self._read: list[tuple[list[Slot], GradientFunction, GradientNode]] = []
        #: Whether observers see sums over several nodes, which are found in each execution.
        self._summed = False
        #: The groups with identities; the plan that they run, and its token.
        self._groups: list[frozenset[int]] = []
        self._front: tuple[Plan, Token] | None = None
        #: Whether it is known before the op runs that its nodes give the gradients of inputs.
        self.readable = False
        plan = call.context.plan(AFTER_BACKWARD)
        #: The inputs that have gradients, if routines request them.
        self._slots = differentiable(call.values) if plan else {}
        if plan and not call.called:
            # Observers never need an identity.
            groups = requested_together(plan, self._slots)
            self.readable = not plan.edits or readable(call, groups)
        #: Sequence number before the op itself ran.
        self.begin = 0

    def before(self, values: list[Any], start: int) -> list[Any]:
        """Prepare for gradients of inputs, and return the values that the op will run on.

        Args:
            values: The inputs.
            start: Sequence number before the op.
        """
        self.begin = start
        call, after, slots = self._call, self._context.plan(AFTER_BACKWARD), self._slots
        if not after and not call.session.wants(AFTER_FORWARD):
            return values
        # A routine may still request gradients later, when written inputs have other edges.
        is_due = call.session.due(self._context, AFTER_FORWARD)
        if not after:
            if is_due:
                self._found(differentiable(values))
            return values
        if call.called and call.tapped:
            self._done = True
            return values
        # The result would not share memory with the input through an identity. An unneeded one
        # would regroup sums of second-order gradients.
        cannot = call.operator.aliases or call.mutated or call.called or self.readable
        self._done = not (cannot or any(map(is_nested_strided, slots.values())))
        if is_due or not self._done:
            self._found(slots)
        return self._tap_inputs(after, values, slots) if self._done else values

    def _found(self, slots: dict[Slot, torch.Tensor]) -> None:
        self._inputs = slots
        if self._call.mutated or not self._call.bound.bound:
            # What the op writes gets another node, and with `squeeze_` another shape.
            self._read_inputs()

    def _read_inputs(self) -> None:
        """Read the edges and shapes of inputs, as late as possible.

        Reading the node of a view whose base was written creates that node.
        """
        given, values = self._inputs, self._call.bound.values
        if not all(map(is_, values, self._call.values)):
            given = differentiable(values)
        for slot, tensor in self._inputs.items():
            if slot not in self._edges:
                self._edges[slot] = edge_of(tensor, edited=given.get(slot) is not tensor)
            self._shapes[slot] = shape_of(tensor)
        self._inputs = {}

    def _tap_inputs(
        self, plan: Plan, values: list[Any], slots: dict[Slot, torch.Tensor]
    ) -> list[Any]:
        token = self._backward.keep(plan)
        self._front = plan, token
        for group in requested_together(plan, slots):
            chosen = [slot for slot in slots if slot[0] in group]
            self._groups.append(group)
            function = gradient_function(self._backward, token, group, chosen, values)
            identities = tap([slots[slot] for slot in chosen], function)
            self._fronts.append((chosen, function))
            for slot, identity in zip(chosen, identities, strict=True):
                self._tapped[id(identity)] = (identity, slots[slot])
                self._edges[slot] = edge_of(identity)
            values = placed(values, chosen, identities)
        self.begin = next_sequence()
        return values

    def gradient_nodes(self, returned: Any) -> list[NodeGradients] | None:
        """Return the nodes that compute gradients of inputs requested together; None if any has no
        such node.

        Args:
            returned: The op's return value.
        """
        if self._summed:
            return None
        nodes, _ = new_nodes([returned], self.begin)
        read: list[tuple[list[Slot], GradientFunction, GradientNode | None]] = [*self._read]
        for chosen, function in self._fronts:
            edges = {slot: self._edges[slot] for slot in chosen}
            read.append((chosen, function, find_gradient_node(nodes, edges)))
        plan, found = self._context.plan(AFTER_BACKWARD), []
        for chosen, function, one in read:
            way = None if one is None else routes([returned], [one.node], self.begin)
            if one is None or way is None:
                return None
            results = [one.results[slot] for slot in chosen]
            positions = {position for position, _ in chosen}
            steps = [step for step in plan.steps if concerns(step, positions)]
            hook = posthook(function, results, [None] * len(results))
            found.append(NodeGradients(hook, steps, way[0], chosen, results))
        return found

    def reusable_functions(self) -> list[tuple[GradientFunction, list[Slot]]] | None:
        """Return functions of gradients, each with its inputs, that further executions can reuse.

        Returns None if an execution needs more than identities of inputs.
        """
        values = self._call.bound.values
        slots = differentiable(values)
        if self._call.operator.aliases or any(p in self._call.mutated for p, _ in slots):
            return None
        if any(map(is_nested_strided, slots.values())):
            return None
        plan, found = self._context.plan(AFTER_BACKWARD), []
        token = self._backward.keep(plan)
        for group in requested_together(plan, slots):
            chosen = [slot for slot in slots if slot[0] in group]
            function = gradient_function(self._backward, token, group, chosen, values)
            found.append((function, chosen))
        return found

    def untap(self, outputs: list[Any]) -> list[Any]:
        """Replace identities among the outputs by the op's inputs, since such an op has done
        nothing.
        """
        if not self._tapped:
            return outputs
        return [
            self._tapped[id(output)][1] if id(output) in self._tapped else output
            for output in outputs
        ]

    def _join(self, plan: Plan, outputs: Sequence[Any], token: Token) -> None:
        """Add routines that were requested after the op ran to those that run at its identities."""
        self._read_inputs()
        groups = requested_together(plan, self._edges)
        if all(group in self._groups for group in groups):
            self._backward.renew(token, plan)
            return
        # The groups have changed: run all steps at the op's nodes, and none in the identities.
        self._tap_nodes(plan, outputs, self.begin)
        self._backward.renew(token, Plan())
        # Further executions will have identities for the whole plan, so forget these.
        self._fronts.clear()
        self._read.clear()

    def _tap_nodes(self, plan: Plan, outputs: Sequence[Any], start: int) -> None:
        """Register a hook on the node whose results are the requested gradients."""
        self._read_inputs()
        token = self._backward.keep(plan)
        nodes, _ = new_nodes(self._call.made(outputs), start)
        region = region_of(self._call)
        base = nodes[-1] if region is not None and nodes and (0, None) in self._edges else None
        groups = requested_together(plan, self._edges)
        casts = casts_of_leaves(nodes) if autocast_enabled() else {}
        edges = {slot: casts.get(edge, edge) for slot, edge in self._edges.items()}
        for group, chosen, gradient_node in group_nodes(nodes, edges, groups, base):
            function = gradient_function(self._backward, token, group, chosen, self._call.values)
            if casts:
                given = taken(self._call.values, chosen)
                function = in_dtypes(function, [tensor.dtype for tensor in given])
            if gradient_node is None and not plan.edits:
                self._observe_parts(function, group, chosen, edges, nodes)
                continue
            if gradient_node is None:
                raise UnsupportedError(
                    "The gradients of these inputs come from several backward ops of this op",
                    where=f"insert_after_backward_op, {self._context.where}",
                    fix="Insert before the op runs (require_outputs=False), for one input at a "
                    "time. If the outputs are views of an input, use the raw backward ops",
                )
            results = [gradient_node.results[slot] for slot in chosen]
            regions = [region if slot == (0, None) else None for slot in chosen]
            shapes = [self._shapes[slot] for slot in chosen]
            hook = posthook(function, results, regions)
            gradient_node.node.register_hook(with_shapes(hook, shapes))
            self._read.append((chosen, function, gradient_node))

    def _observe_parts(
        self,
        function: GradientFunction,
        group: frozenset[int],
        chosen: list[Slot],
        edges: Mapping[Slot, Edge],
        nodes: Sequence[Any],
    ) -> None:
        """Show observers the gradients to which several nodes contribute."""
        self._summed = True
        origins = contributors(nodes, edges, chosen)
        if origins is None:
            what = f"gradients of inputs {sorted(group)} of {self._context.name!r}"
            self._backward.unseen[what] = (
                "one tensor is at several positions, and several backward ops compute its gradient"
            )
            return
        for node, hook in summing_hooks(function, origins):
            node.register_hook(hook)

    def after(self, outputs: list[Any], start: int) -> None:
        """Attach the routines for gradients of inputs to the nodes that the op made."""
        after = self._context.plan(AFTER_BACKWARD)
        if after and not self._done:
            self._tap_nodes(after, outputs, start)
        elif self._front is not None and after is not self._front[0]:
            self._join(after, outputs, self._front[1])
