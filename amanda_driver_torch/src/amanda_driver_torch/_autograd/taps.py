"""Aligned gradients: those that arrive at an op's outputs, and those that it gives to its inputs.

Owns how the gradient routines of a forward context are attached to the autograd graph: by hooks on
existing tensors and nodes, or by identity nodes where hooks do not suffice. The module is a little
over 400 lines because it is one class.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from amanda_core import IPoint, OpContext, Plan, Step
from amanda_core.errors import UnsupportedError
from amanda_driver_torch._autograd.backward import Backward
from amanda_driver_torch._autograd.driver_nodes import tap
from amanda_driver_torch._autograd.dry_run import readable
from amanda_driver_torch._autograd.edits import edited_gradient
from amanda_driver_torch._autograd.gradient_hooks import (
    in_dtypes,
    outputs_prehook,
    posthook,
    summing_hooks,
    tensor_hook,
    view_prehook,
    with_shapes,
)
from amanda_driver_torch._autograd.gradient_nodes import (
    GradientNode,
    Result,
    casts_of_leaves,
    contributors,
    find_gradient_node,
    group_nodes,
)
from amanda_driver_torch._autograd.lifetime import Token
from amanda_driver_torch._autograd.nodes import (
    Edge,
    Place,
    Slot,
    differentiable,
    edge_of,
    new_nodes,
    placed,
    routes,
    tensors_in,
)
from amanda_driver_torch._autograd.operator_call import Call
from amanda_driver_torch._autograd.view_regions import ViewRegion
from amanda_driver_torch._thread.modes import changes_of
from amanda_driver_torch._torch.internals import autocast_enabled, next_sequence
from amanda_driver_torch._torch.tensor_attributes import (
    base_of,
    is_nested_strided,
    is_strided,
    node_of,
    output_number,
    shape_of,
    without_overrides,
)

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


class OutputGradients(NamedTuple):
    """How to hook the gradients of some outputs.

    Attributes:
        hook: Runs the steps; of the output's tensor if there is one, else of the node.
        steps: The steps.
        numbers: Position of an output -> its number among the results of the node that made it.
    """

    hook: Callable[..., Any]
    steps: list[Step]
    numbers: dict[int, int]


class Taps:
    """The aligned gradient routines of one execution."""

    def __init__(self, backward: Backward, context: OpContext, call: Call) -> None:
        self._backward, self._context, self._call = backward, context, call
        #: id of an identity -> the identity (held so that the id is not reused) and its input.
        self._tapped: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._done = False
        self._edges: dict[Slot, Edge] = {}
        #: Inputs whose edges and shapes are not read yet.
        self._inputs: dict[Slot, torch.Tensor] = {}
        #: Shapes before the op ran, since ops like `squeeze_` change the shape of their input.
        self._shapes: dict[Slot, torch.Size] = {}
        #: Groups of inputs that go through identities, and the functions of their gradients.
        self._fronts: list[tuple[list[Slot], Callable[..., Sequence[Any]]]] = []
        #: Groups of inputs whose gradients are read at a node instead, and the node.
        self._read: list[tuple[list[Slot], Callable[..., Sequence[Any]], GradientNode]] = []
        #: Whether observers see sums over several nodes, which are found in each execution.
        self._summed = False
        #: The groups with identities; the plan that they run, and its token.
        self._groups: list[frozenset[int]] = []
        self._front: tuple[Plan, Token] | None = None
        #: Whether it is known before the op runs that its nodes give the gradients of inputs.
        self.readable = False
        plan = context.plan(IPoint.AFTER_BACKWARD)
        #: The inputs that have gradients, if routines request them.
        self._slots = differentiable(call.values) if plan else {}
        if plan and not call.called:
            positions = {position for position, _ in self._slots}
            # Observers never need an identity.
            self.readable = not plan.edits or readable(call, context, _groups(plan, positions))
        #: Sequence number before the op itself ran.
        self.begin = 0

    # Gradients of inputs.

    def before(self, values: list[Any], start: int) -> list[Any]:
        """Prepare for gradients of inputs, and return the values that the op will run on.

        Args:
            values: The inputs.
            start: Sequence number before the op.
        """
        self.begin = start
        after = self._context.plan(IPoint.AFTER_BACKWARD)
        if not after and not self._call.session.wants(IPoint.AFTER_FORWARD):
            return values
        slots = self._slots if after else differentiable(values)
        if not after:
            # A routine may still request gradients later, when written inputs have other edges.
            if self._call.session.due(self._context, IPoint.AFTER_FORWARD):
                self._found(slots)
            return values
        if self._call.called and self._call.tapped:
            self._done = True
            return values
        if (
            # The result would not share memory with the input through an identity.
            self._call.operator.aliases
            or self._call.mutated
            or self._call.called
            # An unneeded identity would regroup sums of second-order gradients.
            or self.readable
            or any(map(is_nested_strided, slots.values()))
        ):
            self._found(slots)
            return values
        self._done = True
        if self._call.session.due(self._context, IPoint.AFTER_FORWARD):
            self._found(slots)
        return self._tap_inputs(after, values, slots)

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
        for group in _groups(plan, {position for position, _ in slots}):
            chosen = [slot for slot in slots if slot[0] in group]
            if not chosen:
                continue
            self._groups.append(group)
            function = self._function(token, group, chosen, len(values), values)
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
        read: list[tuple[list[Slot], Callable[..., Sequence[Any]], GradientNode | None]] = [
            *self._read
        ]
        for chosen, function in self._fronts:
            edges = {slot: self._edges[slot] for slot in chosen}
            read.append((chosen, function, find_gradient_node(nodes, edges)))
        found = []
        for chosen, function, gradient_node in read:
            way = (
                routes([returned], [gradient_node.node], self.begin)
                if gradient_node is not None
                else None
            )
            if gradient_node is None or way is None:
                return None
            results = [gradient_node.results[slot] for slot in chosen]
            plan = self._context.plan(IPoint.AFTER_BACKWARD)
            positions = {position for position, _ in chosen}
            steps = [step for step in plan.steps if _concerns(step, positions)]
            hook = posthook(function, results, [None] * len(results))
            found.append(NodeGradients(hook, steps, way[0], chosen, results))
        return found

    def reusable_functions(
        self,
    ) -> list[tuple[Callable[[Sequence[Any]], Sequence[Any]], list[Slot]]] | None:
        """Return functions of gradients, each with its inputs, that further executions can reuse.

        Returns None if an execution needs more than identities of inputs.
        """
        values = self._call.bound.values
        slots = differentiable(values)
        if self._call.operator.aliases or any(p in self._call.mutated for p, _ in slots):
            return None
        if any(map(is_nested_strided, slots.values())):
            return None
        plan, found = self._context.plan(IPoint.AFTER_BACKWARD), []
        token = self._backward.keep(plan)
        for group in _groups(plan, {position for position, _ in slots}):
            chosen = [slot for slot in slots if slot[0] in group]
            function = self._function(token, group, chosen, len(values), values)
            found.append((function, chosen))
        return found

    def reusable_output_hooks(self, outputs: Sequence[Any]) -> list[OutputGradients] | None:
        """Return hooks for gradients of outputs that further executions can reuse.

        After the gradients, a hook accepts the results of its first steps' routines. Returns None
        if an execution needs more.
        """
        plan, count, found = self._context.plan(IPoint.BEFORE_BACKWARD), len(outputs), []
        token = self._backward.keep(plan)
        for group, chosen in self._output_groups(plan, outputs):
            function = self._function(token, group, list(chosen), count, outputs)
            steps = [step for step in plan.steps if _concerns(step, group)]
            numbers = {position: output_number(t) for (position, _), t in chosen.items()}
            if len(chosen) == 1:
                found.append(OutputGradients(tensor_hook(function), steps, numbers))
            elif len({node_of(tensor) for tensor in chosen.values()}) == 1:
                hook = outputs_prehook(function, list(numbers.values()))
                found.append(OutputGradients(hook, steps, numbers))
            else:
                return None
        return found

    def _output_groups(
        self, plan: Plan, outputs: Sequence[Any]
    ) -> list[tuple[frozenset[int], dict[Slot, torch.Tensor]]]:
        """Return the outputs whose gradients are requested together."""
        inputs = {id(t) for t in tensors_in([*self._call.bound.values, *self._call.values])}
        slots = {
            slot: tensor
            for slot, tensor in differentiable(outputs).items()
            # An output that is an input has no node of this op, and so no gradient.
            if self._call.bound.signature.in_place or id(tensor) not in inputs
        }
        groups = [
            (group, {slot: tensor for slot, tensor in slots.items() if slot[0] in group})
            for group in _groups(plan, {position for position, _ in slots})
        ]
        return [(group, chosen) for group, chosen in groups if chosen]

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
        groups = _groups(plan, {position for position, _ in self._edges})
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
        token, count = self._backward.keep(plan), len(self._call.values)
        nodes, _ = new_nodes(self._call.made(outputs), start)
        region = self._region()
        base = nodes[-1] if region is not None and nodes and (0, None) in self._edges else None
        groups = _groups(plan, {position for position, _ in self._edges})
        casts = casts_of_leaves(nodes) if autocast_enabled() else {}
        edges = {slot: casts.get(edge, edge) for slot, edge in self._edges.items()}
        for group, chosen, gradient_node in group_nodes(nodes, edges, groups, base):
            function = self._function(token, group, chosen, count, self._call.values)
            if casts:
                values = self._call.values
                given = [values[p] if item is None else values[p][item] for p, item in chosen]
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
        function: Callable[..., Sequence[Any]],
        group: frozenset[int],
        chosen: list[Slot],
        edges: Mapping[Slot, Edge],
        nodes: Sequence[Any],
    ) -> None:
        """Show observers the gradients to which several nodes contribute."""
        self._summed = True
        origins = contributors(nodes, edges, chosen)
        if origins is None:
            self._call.note_unseen(
                f"gradients of inputs {sorted(group)} of {self._context.name!r}",
                "one tensor is at several positions, and several backward ops compute its gradient",
            )
            return
        for node, hook in summing_hooks(function, origins):
            node.register_hook(hook)

    def _region(self) -> ViewRegion | None:
        """Return the region in the base, if the op wrote a view in place."""
        view = self._call.values[0] if self._call.bound.signature.in_place else None
        if not (isinstance(view, torch.Tensor) and is_strided(view)):
            return None
        base = base_of(view)
        if base is None or not is_strided(base):
            return None
        # A base without a node has no recorded gradient.
        return ViewRegion(view) if node_of(base) is not None else None

    # Gradients of outputs.

    def after(self, outputs: list[Any], start: int) -> None:
        """Attach the routines for gradients of inputs to the nodes that the op made."""
        after = self._context.plan(IPoint.AFTER_BACKWARD)
        if after and not self._done:
            self._tap_nodes(after, outputs, start)
        elif self._front is not None and after is not self._front[0]:
            self._join(after, outputs, self._front[1])

    def outputs(self, outputs: list[Any]) -> list[Any]:
        """Attach the routines for gradients of outputs, and return the outputs to use.

        This happens before the op's nodes are hooked, so that routines of the aligned view run
        first.
        """
        plan = self._context.plan(IPoint.BEFORE_BACKWARD)
        if not plan.steps:
            return outputs
        token = self._backward.keep(plan)
        region = self._region()
        if region is not None:
            function = self._function(token, frozenset({0}), [(0, None)], len(outputs), outputs)
            # The view's own node does not exist yet. Its gradient arrives through the base.
            base = base_of(self._call.values[0])
            assert base is not None
            node_of(base).register_prehook(view_prehook(function, region))
            return outputs
        roots = {_root(t) for t in tensors_in(self._call.values)}
        for group, slots in self._output_groups(plan, outputs):
            chosen = list(slots)
            function = self._function(token, group, chosen, len(outputs), outputs)
            if len(chosen) == 1:
                node_of(slots[chosen[0]])  # Protects the node, as `register_hook` reads it, too.
                with without_overrides():
                    slots[chosen[0]].register_hook(tensor_hook(function))  # type: ignore[no-untyped-call]
                continue
            arriving = [slots[slot] for slot in chosen]
            made_by = {node_of(t) for t in arriving}
            if len(made_by) == 1:
                # An identity would regroup sums of second-order gradients. Its outputs would also
                # no longer be views, and so could be written unnoticed.
                node: Any = made_by.pop()
                numbers = [output_number(t) for t in arriving]
                node.register_prehook(outputs_prehook(function, numbers))
                continue
            if not plan.edits:
                self._call.note_unseen(
                    f"gradients of outputs {sorted(group)} of {self._context.name!r}",
                    "they go to several backward ops of this op, which an observer must not change",
                )
                continue
            if any(base_of(t) is not None and _root(t) in roots for t in arriving):
                raise UnsupportedError(
                    "The gradients of these outputs go to several backward ops of this op",
                    where=f"insert_before_backward_op, {self._context.where}",
                    fix="Insert for one output at a time, since the outputs are views of an input",
                )
            identities = tap([slots[slot] for slot in chosen], function)
            outputs = placed(outputs, chosen, identities)
        return outputs

    def _function(
        self,
        token: Token,
        group: frozenset[int],
        slots: Sequence[Slot],
        count: int,
        values: Sequence[Any],
    ) -> Callable[..., Sequence[Any]]:
        """Return a function that maps the gradients at `slots` through the steps of a kept plan.

        It holds no tensor. After the gradients, it accepts the results of its first steps'
        routines.

        Args:
            token: The key of the plan.
            group: The positions at `slots`.
            slots: The places of the gradients.
            count: The number of positions.
            values: The values at all positions, for the lengths of lists.
        """
        lifetime, held = self._backward.lifetime, weakref.ref(self._backward)
        lengths = {p: len(values[p]) for p, index in slots if index is not None}

        def function(grads: Sequence[Any], done: tuple[Any, ...] = ()) -> Sequence[Any]:
            backward = held()
            if not lifetime.active() or backward is None:
                return grads
            plan = backward.plan_of(token)
            assert plan is not None
            positions: list[Any] = [None] * count
            for position, length in lengths.items():
                positions[position] = [None] * length
            for (position, index), grad in zip(slots, grads, strict=True):
                if index is None:
                    positions[position] = grad
                else:
                    positions[position][index] = grad
            # All gradients that a step needs are in one group.
            steps = [s for s in plan.steps if _concerns(s, group)]
            for i, step in enumerate(steps):
                if backward.still_applied(step):
                    _run_step(step, positions, done[i : i + 1])
            return [
                positions[position] if index is None else positions[position][index]
                for position, index in slots
            ]

        return function


def _run_step(step: Step, positions: list[Any], done: tuple[Any, ...]) -> None:
    for position, new in changes_of(step, positions, done):
        old = positions[position]
        if isinstance(old, list):
            new = [edited_gradient(one, other, step) for one, other in zip(old, new, strict=True)]
        else:
            new = edited_gradient(old, new, step)
        positions[position] = new


def _concerns(step: Step, group: frozenset[int] | set[int]) -> bool:
    """Return True if a step needs the gradient of any position in `group`."""
    positions = step.action.positions
    return bool(group) if positions is None else not group.isdisjoint(positions)


def _groups(plan: Plan, present: set[int]) -> list[frozenset[int]]:
    """Group the positions in `present` that any step requests together, directly or indirectly."""
    groups: list[set[int]] = []
    if len(plan.steps) == 1 and plan.steps[0].action.positions is None:
        return [frozenset(present)] if present else []
    for step in plan.steps:
        positions = step.action.positions
        new = set(present) if positions is None else present.intersection(positions)
        if not new:
            continue
        joined = [group for group in groups if group & new]
        groups = [group for group in groups if not group & new]
        groups.append(new.union(*joined))
    return [frozenset(group) for group in groups]


def _root(tensor: torch.Tensor) -> int:
    """Return the id of the base of a view; of another tensor, its own id."""
    base = base_of(tensor)
    return id(tensor if base is None else base)
