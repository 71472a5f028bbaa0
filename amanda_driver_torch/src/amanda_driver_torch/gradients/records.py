"""Records of ops (operators at one place of a program) and of backward ops, with their plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from amanda_core.driver_kit import OpContext, Plan, Session
from amanda_core.interface import RoutineResultError, Site
from amanda_driver_torch.gradients.edits import check_gradient, edited_gradient, refused
from amanda_driver_torch.gradients.nodes import BackwardOp, PartOp, tensors_in
from amanda_driver_torch.threads.modes import analysed, changes_of
from amanda_driver_torch.threads.recordings import current
from amanda_driver_torch.threads.state import AFTER_BACKWARD, BEFORE_BACKWARD
from amanda_driver_torch.torch_internals.internals import current_node, next_sequence

__all__ = ["BackwardProgram", "FlatRecord", "NodeRecord", "OpRecord", "PartRecord"]


class BackwardProgram(Protocol):
    """The backward program, as the record of a backward op sees it.

    Attributes:
        session: The session.
        second_order: Whether gradients of gradients are analysed, too.
    """

    session: Session
    second_order: bool

    def track_second_order(
        self, record: NodeRecord, tensors: Sequence[torch.Tensor], start: int
    ) -> None:
        """Register hooks on the nodes that a node made while it ran."""


class OpRecord:
    """The data of an attachment about one op."""

    __slots__ = (
        "caller",
        "context",
        "hooks",
        "idle_epoch",
        "idle_nodes",
        "kept",
        "nodes",
        "program",
        "site",
    )

    def __init__(self, site: Site, caller: str) -> None:
        self.site = site
        #: Module of the frame that calls the operator.
        self.caller = caller
        self.context: OpContext | None = None
        #: Epoch in which this op has no actions; 0 for none.
        self.idle_epoch = 0
        #: Number of backward nodes that it made in that epoch; if it differs, they are analysed
        #: again. -1 if some of them have not run, and so have not been analysed.
        self.idle_nodes = 0
        self.nodes: dict[Any, NodeRecord] = {}
        #: Whether it is that of an earlier session, and its op has not been analysed since.
        self.kept = False
        #: The plan in the native interceptor's form, if it has one.
        self.program: Any = None
        #: The plans of its nodes in the native interceptor's form.
        self.hooks: object = None

    def settle(self, epoch: int) -> None:
        """Forget what ends with a session: hooks of graphs, and kept results.

        Args:
            epoch: The last epoch of the session.
        """
        self.kept = True
        if self.hooks is not None or any(one.settled != epoch for one in self.nodes.values()):
            self.nodes, self.hooks, self.program, self.idle_epoch = {}, None, None, 0
        elif self.program is not None and not self.program.is_plain:
            self.program = None


class NodeRecord:
    """One backward op of one forward op (or of a leaf), and the actions around it."""

    #: Makes the raw operator that contexts show.
    op: type[BackwardOp] = BackwardOp
    __slots__ = (
        "__weakref__",
        "_acting",
        "_start",
        "backward",
        "context",
        "forward",
        "planned",
        "settled",
        "site",
    )

    def __init__(self, backward: BackwardProgram, site: Site, forward: OpContext | None) -> None:
        self.backward = backward
        self.site = site
        self.forward = forward
        self.context: OpContext | None = None
        #: Epoch in which analysis found no actions; 0 for none.
        self.settled = 0
        #: An epoch, the function that hooks this leaf in it, and the plans by which C does so; None
        #: before they are known.
        self.planned: tuple[int, Callable[[Any], object], object] | None = None
        self._start = 0
        #: The epoch in which it was analysed, and whether it has actions then.
        self._acting = 0, False

    def idle(self, session: Session) -> bool:
        """Return True if this node needs no hook: analysed in this epoch, and without actions."""
        if not session.caching or self.backward.second_order:
            return False
        # In an epoch in which no tool looks at it, the node is not analysed when it runs.
        if self.settled != session.epoch and self._acts(session) is False:
            self.settled = session.epoch
        return self.settled == session.epoch

    def analysed(self, session: Session) -> bool:
        """Return True if no analysis routine is due for this node."""
        return self._acts(session) is not None

    def _acts(self, session: Session) -> bool | None:
        """Return whether this node has actions; None if an analysis routine is due."""
        epoch, acts = self._acting
        if epoch == session.epoch and session.caching:
            return acts
        context = self.context
        if context is None or (
            session.due(context, BEFORE_BACKWARD) or session.due(context, AFTER_BACKWARD)
        ):
            return None
        acts = bool(context.plan(BEFORE_BACKWARD) or context.plan(AFTER_BACKWARD))
        self._acting = session.epoch, acts
        return acts

    def open_context(self, session: Session) -> OpContext:
        """Open its context for this execution."""
        op = self.op(self.site.op_type)
        self.context = session.open(self.site, op, forward=self.forward, backward=True)
        return self.context

    def before(self, grads: Sequence[Any], done: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
        """Analyse the node and run the routines before it; return its gradients if they changed.

        Args:
            grads: The gradients.
            done: Results of the first steps' routines, if they have been called already.
        """
        session = self.backward.session
        context = self.open_context(session)
        self._start = next_sequence()
        try:
            context.execution["grad_outputs"] = list(grads)
            plan = analysed(context, BEFORE_BACKWARD)
            return _fold(plan, grads, done)
        finally:
            context.release()

    def after(
        self, grad_inputs: Sequence[Any], grads: Sequence[Any], done: tuple[Any, ...] = ()
    ) -> tuple[Any, ...] | None:
        """Replace, analyse and run the routines after the node; return its results if they changed.

        Args:
            grad_inputs: The results.
            grads: The gradients before the node.
            done: Results of the first steps' routines, if they have been called already.
        """
        session, backward = self.backward.session, self.backward
        context = self.context = self.open_context(session)
        try:
            context.execution["grad_outputs"] = list(grads)
            before = context.plan(BEFORE_BACKWARD)
            results: Sequence[Any] = grad_inputs
            replacement = before.replacement
            if replacement is not None and (recording := current()) is not None:
                recording.leave_out(replacement)
            elif replacement is not None:
                results = _replaced(before, grads, grad_inputs, context)
            context.execution["grad_inputs"] = list(results)
            plan = analysed(context, AFTER_BACKWARD)
            changed = _fold(plan, results, done)
            # Gradients of gradients are found from here, so with these the node stays hooked.
            if not (before or plan) and session.caching and not backward.second_order:
                self.settled = session.epoch
            if backward.second_order and torch.is_grad_enabled():
                backward.track_second_order(self, tensors_in(grad_inputs), self._start)
            if changed is not None:
                return changed
            return tuple(results) if results is not grad_inputs else None
        finally:
            context.release()


class PartRecord(NodeRecord):
    """The accumulation into one of the parameters that are parts of a leaf."""

    __slots__ = ()
    op = PartOp


class FlatRecord(NodeRecord):
    """The accumulation into a leaf that consists of several parameters: an op for each of them.

    Attributes:
        parts: The record of each parameter, where it begins in the leaf, and its shape.
    """

    __slots__ = ("parts",)

    parts: list[tuple[PartRecord, int, tuple[int, ...]]]

    def idle(self, session: Session) -> bool:
        """Return True if no part needs a hook."""
        return all(record.idle(session) for record, _, _ in self.parts)

    def analysed(self, session: Session) -> bool:
        """Return False: C cannot run the plans of parts."""
        return False

    def before(self, grads: Sequence[Any], done: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
        """Analyse the parts and run the routines before them; return the gradient if it changed."""
        (whole,) = grads
        changed = None
        for record, start, shape in self.parts:
            if whole is None or (new := record.before([_cut(whole, start, shape)])) is None:
                continue
            changed = whole.clone() if changed is None else changed
            _cut(changed, start, shape).copy_(new[0])
        return None if changed is None else (changed,)

    def after(
        self, grad_inputs: Sequence[Any], grads: Sequence[Any], done: tuple[Any, ...] = ()
    ) -> tuple[Any, ...] | None:
        """Run the routines after the parts, which have no results."""
        for record, start, shape in self.parts:
            if grads[0] is not None:
                record.after(grad_inputs, [_cut(grads[0], start, shape)])
        return None


def _cut(whole: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view of a part of a tensor with one dimension."""
    return whole[start : start + math.prod(shape)].view(shape)


def _fold(plan: Plan, grads: Sequence[Any], done: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the gradients after the steps of `plan`, or None if they are unchanged.

    Args:
        plan: The plan.
        grads: The gradients.
        done: Results of the first steps' routines, if they have been called already.
    """
    if not plan.steps:
        return None
    values = list(grads)
    changed = False
    for i, step in enumerate(plan.steps):
        for position, new in changes_of(step, values, done[i : i + 1]):
            values[position] = edited_gradient(values[position], new, step)
            changed = True
    return tuple(values) if changed else None


def _replaced(
    plan: Plan, grads: Sequence[Any], results: Sequence[Any], context: OpContext
) -> list[Any]:
    """Return a replacement's results, which are used instead of the node's own."""
    assert plan.replacement is not None
    given = plan.replacement.replace(list(grads))
    values = list(given) if isinstance(given, (tuple, list)) else [given]
    if len(values) != len(results):
        raise RoutineResultError(
            f"A replacement returned {len(values)} gradients, but this backward op has "
            f"{len(results)} results",
            where=plan.replacement.where,
            fix="Return one value for each, None for a missing gradient",
        )
    receivers = current_node().next_functions
    for index, (old, new) in enumerate(zip(results, values, strict=True)):
        if old is None and new is not None:
            if receivers[index][0] is not None:
                raise refused(
                    plan.replacement,
                    f"Result {index} of {context.name} is None in this backward pass; "
                    "PyTorch does not let a hook supply one",
                    "Use replace_backward_op on the forward context",
                )
            values[index] = None  # No node receives this result.
        else:
            check_gradient(old, new, plan.replacement)
    return values
