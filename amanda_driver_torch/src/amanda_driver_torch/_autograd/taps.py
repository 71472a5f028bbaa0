"""Aligned gradients: what arrives at an op's outputs, what the op gives to its inputs.

Owns where the routines asked for on a forward context meet the autograd graph: hooks on tensors
and nodes that are there anyway, and identity nodes where these do not serve.
A little over 400 lines: one class.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from amanda_core import IPoint, OpContext, Plan, Step
from amanda_core.errors import UnsupportedError
from amanda_driver_torch._autograd.backward import Backward
from amanda_driver_torch._autograd.call import Call
from amanda_driver_torch._autograd.edits import edited_gradient
from amanda_driver_torch._autograd.gradient_hooks import (
    outputs_prehook,
    posthook,
    summing_hooks,
    tensor_hook,
    window_prehook,
    with_shapes,
)
from amanda_driver_torch._autograd.lifetime import Token
from amanda_driver_torch._autograd.meetings import Meeting, Result, contributors, meeting, readings
from amanda_driver_torch._autograd.nodes import (
    Edge,
    Slot,
    differentiable,
    edge_of,
    new_nodes,
    placed,
    route,
    tensors_in,
)
from amanda_driver_torch._autograd.own_nodes import tap
from amanda_driver_torch._autograd.rehearsal import readable
from amanda_driver_torch._autograd.windows import Window
from amanda_driver_torch._thread.modes import changes_of
from amanda_driver_torch._torch.internals import next_sequence
from amanda_driver_torch._torch.reading import (
    base_of,
    dtype_of,
    is_nested_strided,
    is_strided,
    node_of,
    output_number,
    shape_of,
    without_overrides,
)

__all__ = ["Taps", "asked"]


def asked(context: OpContext) -> bool:
    """Return True if some routine wants a gradient of the op as a whole."""
    return bool(context.plan(IPoint.BEFORE_BACKWARD) or context.plan(IPoint.AFTER_BACKWARD))


class Met(NamedTuple):
    """Gradients of inputs that meet in one node.

    Attributes:
        hook: Runs all steps on results of the node; see `posthook`.
        steps: The steps that want some of these gradients.
        route: The way to the node; see `nodes.route`.
        positions: The inputs.
        results: The result of the node that is the gradient of each.
    """

    hook: Callable[..., Any]
    steps: list[Step]
    route: tuple[Any, ...]
    positions: list[int]
    results: list[Result]


class Taps:
    """The aligned gradient routines of one execution."""

    def __init__(self, backward: Backward, context: OpContext, call: Call) -> None:
        self._backward, self._context, self._call = backward, context, call
        #: id of an identity -> the identity, held so that its id stays its own, and the value.
        self._tapped: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._done = False
        self._edges: dict[Slot, Edge] = {}
        #: Inputs whose edges, shapes and dtypes have not been read yet.
        self._inputs: dict[Slot, torch.Tensor] = {}
        #: Shapes before the op ran: `squeeze_` and its like change that of their own input.
        self._shapes: dict[Slot, torch.Size] = {}
        self._dtypes: dict[Slot, torch.dtype] = {}
        #: Groups of inputs that have identities in front of them, and what maps their gradients.
        self._fronts: list[tuple[list[Slot], Callable[..., Sequence[Any]]]] = []
        #: Groups of inputs whose gradients are read at a node instead, and where.
        self._read: list[tuple[list[Slot], Callable[..., Sequence[Any]], Meeting]] = []
        #: Whether observers see sums of what several nodes give, which are found each time.
        self._summed = False
        #: Those groups, the plan that they run, and its token.
        self._groups: list[frozenset[int]] = []
        self._front: tuple[Plan, Token] | None = None
        #: Whether gradients of inputs can be read at the op's nodes, as is known before it runs.
        self.readable = False
        plan = context.plan(IPoint.AFTER_BACKWARD)
        if plan and not call.called:
            positions = {position for position, _ in differentiable(call.values)}
            # For whoever only looks, no identity is put anywhere.
            self.readable = not plan.edits or readable(call, context, _groups(plan, positions))
        #: Sequence number before the op itself ran.
        self.begin = 0

    # Gradients of inputs.

    def before(self, values: list[Any], start: int) -> list[Any]:
        """Prepare for gradients of inputs; returns the values that the op is to run on.

        Args:
            values: The inputs.
            start: Sequence number before the op.
        """
        self.begin = start
        after = self._context.plan(IPoint.AFTER_BACKWARD)
        if not after and not self._call.session.wants(IPoint.AFTER_FORWARD):
            return values
        slots = differentiable(values)
        if not after:
            # A routine may still ask after the op has run; what the op writes is another edge then.
            if self._call.session.due(self._context, IPoint.AFTER_FORWARD):
                self._found(slots)
            return values
        if self._call.called and self._call.tapped:
            self._done = True
            return values
        if (
            # An identity in front of these would cut what the result shares with the input.
            self._call.operator.aliases
            or self._call.mutated
            or self._call.called
            # Or it is not needed, and would regroup sums of second-order gradients.
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
            # The op gives what it writes another node, and another shape where it is `squeeze_`.
            self._read_inputs()

    def _read_inputs(self) -> None:
        """Read what gradients of inputs are known by, as late as possible.

        To look at the node of a view whose base was written makes it.
        """
        given = differentiable(self._call.bound.values)
        for slot, tensor in self._inputs.items():
            if slot not in self._edges:
                self._edges[slot] = edge_of(tensor, edited=given.get(slot) is not tensor)
            self._shapes[slot] = shape_of(tensor)
            self._dtypes[slot] = dtype_of(tensor)
        self._inputs = {}

    def _tap_inputs(
        self, plan: Plan, values: list[Any], slots: dict[Slot, torch.Tensor]
    ) -> list[Any]:
        token = self._backward.keep(plan)
        self._front = plan, token
        self._dtypes = {slot: dtype_of(tensor) for slot, tensor in slots.items()}
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

    def meetings(self, returned: Any) -> list[Met] | None:
        """Where the gradients of inputs that routines want together meet; None where some do not.

        Args:
            returned: What the op returned.
        """
        if self._summed:
            return None
        nodes, _ = new_nodes([returned], self.begin)
        read: list[tuple[list[Slot], Callable[..., Sequence[Any]], Meeting | None]] = [*self._read]
        for chosen, function in self._fronts:
            edges = {slot: self._edges[slot] for slot in chosen}
            read.append((chosen, function, meeting(nodes, edges)))
        found = []
        for chosen, function, met in read:
            way = route(returned, met.node, self.begin) if met is not None else None
            if met is None or way is None:
                return None
            results = [met.results[slot] for slot in chosen]
            plan = self._context.plan(IPoint.AFTER_BACKWARD)
            count = len(self._call.values)
            steps = [
                s for s in plan.steps if not {p for p, _ in chosen}.isdisjoint(_selected(s, count))
            ]
            dtypes = [self._dtypes[slot] for slot in chosen]
            hook = posthook(function, results, [None] * len(results), dtypes)
            found.append(Met(hook, steps, way, [position for position, _ in chosen], results))
        return found

    def given(self) -> list[tuple[Callable[[Sequence[Any]], Sequence[Any]], list[int]]] | None:
        """Functions of gradients, and the inputs whose they are, that serve further executions.

        None where an execution needs more than identities in front of single inputs.
        """
        values = self._call.bound.values
        if self._call.operator.aliases or self._call.mutated:
            return None
        slots = differentiable(values)
        if any(index is not None or is_nested_strided(t) for (_, index), t in slots.items()):
            return None
        plan, found = self._context.plan(IPoint.AFTER_BACKWARD), []
        token = self._backward.keep(plan)
        for group in _groups(plan, {position for position, _ in slots}):
            chosen = [slot for slot in slots if slot[0] in group]
            function = self._function(token, group, chosen, len(values), values)
            found.append((function, [position for position, _ in chosen]))
        return found

    def arriving(self) -> list[tuple[Callable[..., Any], list[Step]]]:
        """Hooks of a single output that serve further executions, and the steps each runs.

        A hook also takes what the routines of its first steps have returned.
        """
        plan = self._context.plan(IPoint.BEFORE_BACKWARD)
        steps = [step for step in plan.steps if 0 in _selected(step, 1)]
        if not steps:
            return []
        token = self._backward.keep(plan)
        function = self._function(token, frozenset({0}), [(0, None)], 1, self._call.values)
        return [(tensor_hook(function), steps)]

    def untap(self, outputs: list[Any]) -> list[Any]:
        """An op that returns its own input has done nothing: the input itself comes back."""
        if not self._tapped:
            return outputs
        return [
            self._tapped[id(output)][1] if id(output) in self._tapped else output
            for output in outputs
        ]

    def _join(self, plan: Plan, outputs: Sequence[Any], token: Token) -> None:
        """Let a routine that asks after the op join those that had identities put before it."""
        self._read_inputs()
        groups = _groups(plan, {position for position, _ in self._edges})
        if all(group in self._groups for group in groups):
            self._backward.renew(token, plan)
            return
        # It wants other gradients together: all run behind the identities, and none in them.
        self._tap_nodes(plan, outputs, self.begin)
        self._backward.renew(token, Plan())
        # They say nothing of further executions, where identities stand as the whole plan wants.
        self._fronts.clear()
        self._read.clear()

    def _tap_nodes(self, plan: Plan, outputs: Sequence[Any], start: int) -> None:
        """Hook the one node whose results are the gradients wanted."""
        self._read_inputs()
        token, count = self._backward.keep(plan), len(self._call.values)
        nodes, _ = new_nodes(self._call.made(outputs), start)
        window = self._window()
        base = nodes[-1] if window is not None and nodes and (0, None) in self._edges else None
        groups = _groups(plan, {position for position, _ in self._edges})
        for group, chosen, met in readings(nodes, self._edges, groups, base):
            if met is None and not plan.edits:
                self._observe_parts(plan, token, group, chosen, nodes)
                continue
            if met is None:
                raise UnsupportedError(
                    "The gradients of these inputs come from several backward ops of this op",
                    where=f"insert_after_backward_op, {self._context.where}",
                    fix="Ask before the op runs (require_outputs=False), one input at a time; "
                    "for an op whose results are views of its input, take its raw backward ops",
                )
            results = [met.results[slot] for slot in chosen]
            windows = [window if slot == (0, None) else None for slot in chosen]
            shapes = [self._shapes[slot] for slot in chosen]
            function = self._function(token, group, chosen, count, self._call.values)
            hook = posthook(function, results, windows, [self._dtypes[slot] for slot in chosen])
            met.node.register_hook(with_shapes(hook, shapes))
            self._read.append((chosen, function, met))

    def _observe_parts(
        self,
        plan: Plan,
        token: Token,
        group: frozenset[int],
        chosen: list[Slot],
        nodes: Sequence[Any],
    ) -> None:
        """Let observers see gradients that several nodes give, or give parts of."""
        self._summed = True
        origins = contributors(nodes, {slot: self._edges[slot] for slot in chosen})
        if origins is None:
            self._call.note_unseen(
                f"gradients of inputs {sorted(group)} of {self._context.name!r}",
                "one tensor stands at several of these, and several backward ops give its gradient",
            )
            return
        function = self._function(token, group, chosen, len(self._call.values), self._call.values)
        for node, hook in summing_hooks(
            function,
            [origins[slot] for slot in chosen],
            [self._shapes[slot] for slot in chosen],
            [self._dtypes[slot] for slot in chosen],
        ):
            node.register_hook(hook)

    def _window(self) -> Window | None:
        """Where the op wrote a view in place, its place in the base."""
        view = self._call.values[0] if self._call.bound.signature.in_place else None
        if not (isinstance(view, torch.Tensor) and is_strided(view)):
            return None
        base = base_of(view)
        if base is None or not is_strided(base):
            return None
        # Nothing was recorded where the base has no node.
        return Window(view) if node_of(base) is not None else None

    # Gradients of outputs.

    def after(self, outputs: list[Any], start: int) -> None:
        """Attach the routines for gradients of inputs to what the op made."""
        after = self._context.plan(IPoint.AFTER_BACKWARD)
        if after and not self._done:
            self._tap_nodes(after, outputs, start)
        elif self._front is not None and after is not self._front[0]:
            self._join(after, outputs, self._front[1])

    def outputs(self, outputs: list[Any]) -> list[Any]:
        """Attach the routines for gradients of outputs; returns the outputs to go on with.

        Before the op's nodes are hooked: what arrives at the op as a whole comes first.
        """
        plan = self._context.plan(IPoint.BEFORE_BACKWARD)
        if not plan.steps:
            return outputs
        token = self._backward.keep(plan)
        inputs = {id(t) for t in tensors_in([*self._call.bound.values, *self._call.values])}
        in_place = self._call.bound.signature.in_place
        window = self._window()
        if window is not None:
            function = self._function(token, frozenset({0}), [(0, None)], len(outputs), outputs)
            # The view's own node is made by who looks at it; what arrives comes by its base.
            base = base_of(self._call.values[0])
            assert base is not None
            node_of(base).register_prehook(window_prehook(function, window))
            return outputs
        roots = {_root(t) for t in tensors_in(self._call.values)}
        slots = {
            slot: tensor
            for slot, tensor in differentiable(outputs).items()
            # An output that is an input made no node: there is no gradient of this op's own.
            if in_place or id(tensor) not in inputs
        }
        for group in _groups(plan, {position for position, _ in slots}):
            chosen = [slot for slot in slots if slot[0] in group]
            if not chosen:
                continue
            function = self._function(token, group, chosen, len(outputs), outputs)
            if len(chosen) == 1:
                node_of(slots[chosen[0]])  # Protects it, since `register_hook` looks at it, too.
                with without_overrides():
                    slots[chosen[0]].register_hook(tensor_hook(function))  # type: ignore[no-untyped-call]
                continue
            arriving = [slots[slot] for slot in chosen]
            made_by = {node_of(t) for t in arriving}
            if len(made_by) == 1:
                # An identity would regroup sums of second-order gradients; and behind it, views
                # would be views no more, and could be written unnoticed.
                node: Any = made_by.pop()
                numbers = [output_number(t) for t in arriving]
                node.register_prehook(outputs_prehook(function, numbers))
                continue
            if not plan.edits:
                self._call.note_unseen(
                    f"gradients of outputs {sorted(group)} of {self._context.name!r}",
                    "they go to several backward ops of this op, which an observer leaves as "
                    "they are",
                )
                continue
            if any(base_of(t) is not None and _root(t) in roots for t in arriving):
                raise UnsupportedError(
                    "The gradients of these outputs go to several backward ops of this op",
                    where=f"insert_before_backward_op, {self._context.where}",
                    fix="The outputs are views of an input: ask for one at a time",
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
        """Maps the gradients at `slots` through a kept plan's steps of `group`; holds no tensor.

        It also takes what the routines of the first steps have returned, if they have been called.
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
            # All that a step wants and that has a gradient is in one group.
            steps = [s for s in plan.steps if not group.isdisjoint(_selected(s, count))]
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


def _selected(step: Step, count: int) -> Sequence[int]:
    positions = step.action.positions
    return range(count) if positions is None else positions


def _groups(plan: Plan, present: set[int]) -> list[frozenset[int]]:
    """Positions of `present` that some step wants together, directly or through another step."""
    groups: list[set[int]] = []
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
    """Return what a view is a view of, by id; of another tensor, itself."""
    base = base_of(tensor)
    return id(tensor if base is None else base)
