"""Plans in the form that the native interceptor executes.

Owns the decision which plans have that form: insertions before and after the forward op, and before
and after its backward (as a whole, or at one node), without autodiff. All others are executed by
`execute` and `_autograd.backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amanda_core import IPoint, OpContext, Plan, Step
from amanda_core.weights.state import Memoized
from amanda_driver_torch._autograd.backward import Backward
from amanda_driver_torch._autograd.edits import OfAliasing
from amanda_driver_torch._autograd.nodes import BackwardOp, new_nodes, routes, tensors_in
from amanda_driver_torch._autograd.operator_call import Call
from amanda_driver_torch._autograd.records import NodeRecord, OpRecord
from amanda_driver_torch._autograd.taps import Taps, has_gradient_plan
from amanda_driver_torch._operators.overloads import KINDS
from amanda_driver_torch._thread.state import STATE
from amanda_driver_torch._torch.extension import native
from amanda_driver_torch._torch.internals import autocast_enabled, next_sequence
from amanda_driver_torch._torch.tensor_attributes import PLAIN, is_strided

__all__ = ["compiled", "node_plans"]

# Calls with more values than this are executed in Python.
_MANY = 16
# The most arguments of a call that C handles (`MOST_OPERANDS`).
_MOST = 24


def compiled(
    call: Call,
    watch: Any,
    context: OpContext,
    before: Plan,
    after: Plan,
    nodes: int,
    taps: Taps | None,
    returned: Any,
) -> object:
    """Compile the plan of an op to a program for calls like that of `call`; None if it is not
    possible.

    Args:
        call: The execution that has just taken place.
        watch: The native extension's part of the interceptor, or None.
        context: The op's context.
        before: Its plan before forward.
        after: Its plan after forward.
        nodes: Number of backward nodes that the op made, if these need nothing more; else -1.
        taps: The aligned gradients of that execution, if it had gradients.
        returned: The op's return value.
    """
    session, bound = call.session, call.bound
    layout = bound.layout
    if (
        native is None
        or watch is None
        or STATE.recomputing
        or before.replacement is not None
        or context.plan(IPoint.BEFORE_BACKWARD).replacement is not None
        or context.plan(IPoint.AFTER_BACKWARD).replacement is not None
        or layout.outs
        or len(layout.sources) > _MANY
        or session.due(context, IPoint.BEFORE_FORWARD)
        or session.due(context, IPoint.AFTER_FORWARD)
    ):
        return None
    assigns = call.operator.op_type == "__setitem__"
    writes = bound.signature.in_place or not layout.bound  # perhaps
    if writes and (has_gradient_plan(context) or (returned is None and not assigns)):
        # The gradient of what it writes is not that of a new value.
        return None
    # Without gradients there is nothing to differentiate.
    differentiated = any(step.action.autodiff for step in (*before.steps, *after.steps))
    if differentiated and torch.is_grad_enabled():
        return None
    steps = [_parts(step, len(layout.sources), autodiff=True) for step in before.steps]
    steps_after = [_parts(step, _MANY, autodiff=True) for step in after.steps]
    if None in steps or None in steps_after:
        return None
    if call.operator.aliases:
        steps, steps_after = (
            [(*parts[:3], OfAliasing(parts[3]), None) for parts in of_point]
            for of_point in (steps, steps_after)
        )
    else:
        steps = _memoized(steps, before.steps, bound.values)
    args, kwargs = bound.given
    if has_gradient_plan(context) and not all(
        type(value) in PLAIN for value in (*tensors_in(args), *tensors_in(kwargs.values()))
    ):
        # A subclass may override attributes that C would read.
        return None
    names = tuple(kwargs)
    sources = tuple(_argument(source, len(args), names) for source in layout.sources)
    operands = (*args, *kwargs.values())
    if len(operands) > _MOST or any(type(kwargs[name]) not in KINDS for name in layout.attrs):
        return None
    # The context shows attributes as they were in the execution that Python has seen.
    fixed = [(len(args) + names.index(name), kwargs[name]) for name in layout.attrs]
    tapped: list[Any] = []
    node_hooks: Any = None
    required: tuple[int, ...] = ()
    if context.plan(IPoint.AFTER_BACKWARD):
        given = taps.reusable_functions() if taps is not None else []
        if given is None:
            return None
        required = tuple(
            int(value.requires_grad) if isinstance(value, torch.Tensor) else -1
            for value in operands
        )
        for function, positions in given:
            arguments = tuple(sources[position] for position in positions)
            if -1 in arguments:
                return None
            tapped.append((function, arguments))
        node_hooks = _node_hooks(call, sources, operands, taps, returned)
        if taps is not None and taps.readable and node_hooks is None:
            return None
        if node_hooks is not None:
            assert taps is not None
            # Without identities, there are fewer nodes.
            tapped, nodes = [], nodes - (taps.begin - call.start) if nodes >= 0 else nodes
    arrivals: list[Any] = []
    if context.plan(IPoint.BEFORE_BACKWARD) and taps is not None:
        if not isinstance(returned, torch.Tensor):
            return None
        for hook, hooked in taps.reusable_output_hooks():
            parts = [_parts(step, 1) for step in hooked]
            if None in parts:
                return None
            arrivals.append((hook, parts))
    return native.Program(
        session.epoch,
        tuple(type(value) for value in operands),
        names,
        sources,
        layout.defaults,
        steps,
        steps_after,
        context.execution,
        nodes,
        tapped,
        required,
        # Without gradients in this execution, nothing is known about them. An op that writes its
        # argument must save copies before it runs, if its result may be edited.
        not differentiated
        and (taps is not None or not has_gradient_plan(context))
        and not (writes and after.edits),
        watch,
        arrivals,
        node_hooks,
        context,
        bound.signature.mutated or None,
        assigns,
        -1 if layout.spread is None else layout.spread,
        fixed,
        len(returned) if isinstance(returned, (tuple, list)) else 1,
    )


def _node_hooks(
    call: Call,
    sources: tuple[int, ...],
    operands: tuple[Any, ...],
    taps: Taps | None,
    returned: Any,
) -> Any:
    """Return how to hook gradients of inputs at the nodes that compute them; None if identities are
    needed.
    """
    output = returned[0] if isinstance(returned, tuple) and returned else returned
    if taps is None or type(output) is not torch.Tensor or autocast_enabled():
        return None
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    if not all(map(is_strided, tensors)):
        return None
    if any(t.requires_grad and t.dtype != output.dtype for t in tensors):
        # The engine may convert the op's gradients.
        return None
    gradient_nodes = taps.gradient_nodes(output)
    if not gradient_nodes:
        return None
    hooks = []
    for one in gradient_nodes:
        steps = [_parts(step, len(sources)) for step in one.steps]
        if None in steps:
            return None
        ways = [
            (position, result.number, result.way)
            for position, result in zip(one.positions, one.results, strict=True)
        ]
        hook = (one.hook, steps, one.route, len(sources), ways)
        hooks.append((hook, tuple(sources[position] for position in one.positions)))
    # The nodes that an op makes depend on more than the types of its arguments.
    laid = [
        (index, value.ndim, value.is_contiguous(), value.dtype)
        for index, value in enumerate(operands)
        if type(value) is torch.Tensor
    ]
    return (call.made_count - (taps.begin - call.start), autocast_enabled, laid, hooks)


def node_plans(
    backward: Backward, watch: Any, record: OpRecord, outputs: Sequence[Any], start: int
) -> object:
    """Return the plans of an op's nodes for executions like the last one.

    Args:
        backward: The backward program.
        watch: The native extension's part of the interceptor, or None.
        record: The op's record.
        outputs: The op's outputs.
        start: Value of `next_sequence` before it ran.

    Returns:
        The plans; None while some nodes have not been analysed; or a tuple of the epoch and the
        number of nodes for which such plans are not possible.
    """
    session = backward.session
    made = next_sequence() - start
    failed = (session.epoch, made)
    if native is None or watch is None or backward.second_order or not session.caching:
        return None
    if record.hooks == failed or not all(r.analysed(session) for r in record.nodes.values()):
        return record.hooks
    if not outputs or any(type(output) is not torch.Tensor for output in outputs):
        return failed
    nodes, leaves = new_nodes(outputs, start)
    planned = backward.planned_leaves(leaves)
    if not nodes or planned is None:
        return None
    hooked: list[tuple[Any, NodeRecord]] = []
    for node, own in backward.record_of(record.nodes, nodes):
        if own is None or own.context is None:
            return None
        if own.idle(session):
            continue
        hooked.append((node, own))
    targets = [node for node, *_ in (*hooked, *planned)]
    ways = routes(outputs, targets, start)
    if ways is None:
        return failed
    places, numbers = ways
    plans: tuple[list[Any], list[Any]] = [], []
    for (_, own), number in zip(hooked, numbers, strict=False):
        if not _add_steps(backward, own, number, plans):
            return failed
    hooks = []
    for (_, own, leaf), number in zip(planned, numbers[len(hooked) :], strict=True):
        hook = _leaf_hook(backward, watch, own)
        if hook is None:
            return failed
        hooks.append((number, leaf, hook))
    return native.NodePlans(session.epoch, made, watch, *plans, None, places, hooks)


def _add_steps(
    backward: Backward, record: NodeRecord, number: int, plans: tuple[list[Any], list[Any]]
) -> bool:
    """Add the steps before and after a node to `plans`; return False if they need Python."""
    context = record.context
    assert context is not None
    points = IPoint.BEFORE_BACKWARD, IPoint.AFTER_BACKWARD
    if context.plan(points[0]).replacement is not None:
        return False
    for point, hook, hooked in zip(points, backward.hooks(record), plans, strict=True):
        steps = [_parts(step, _MANY) for step in context.plan(point).steps]
        if None in steps:
            return False
        if steps:
            op = BackwardOp(record.site.op_type)
            hooked.append((hook, steps, number, context.execution, op))
    return True


def _leaf_hook(backward: Backward, watch: Any, record: NodeRecord) -> Any:
    """Return a function that hooks the accumulation into a leaf; None if that needs Python."""
    epoch = backward.session.epoch
    if record.planned is None or record.planned[0] != epoch:
        plans: tuple[list[Any], list[Any]] = [], []
        if not _add_steps(backward, record, 0, plans):
            return None
        made = native.NodePlans(epoch, 0, watch, *plans)
        record.planned = (epoch, backward.planned_hook(made.make))
    return record.planned[1]


def _argument(source: int | str | None, count: int, names: tuple[str, ...]) -> int:
    """Return the number of an argument, counting keyword arguments last; -1 if there is none."""
    if source is None:
        return -1
    return count + names.index(source) if isinstance(source, str) else source


def _parts(step: Step, count: int, autodiff: bool = False) -> Any:
    """Return routine, keyword arguments, positions, step and None; None alone if the step needs
    more than these.
    """
    action = step.action
    positions = action.positions
    if (action.autodiff and not autodiff) or len(action.kwargs) > _MANY // 2:
        return None
    if positions is not None and not all(0 <= position < count for position in positions):
        return None
    return action.routine, dict(action.kwargs), positions, step, None


def _memoized(parts: list[Any], steps: Sequence[Step], values: Sequence[Any]) -> list[Any]:
    """Return the parts with the stamps of memoized routines in place of None."""
    found = []
    for part, step in zip(parts, steps, strict=True):
        routine, positions = step.action.routine, step.action.positions or ()
        if isinstance(routine, Memoized) and len(positions) == 1:
            value: Any = values[positions[0]]
            if type(value) in PLAIN:
                part = (*part[:4], routine.stamp)
        found.append(part)
    return found
