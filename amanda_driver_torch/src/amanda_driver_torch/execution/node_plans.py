"""Plans of an op's nodes in the form in which the native interceptor sets their hooks.

Owns the decision which plans have that form, and which functions C calls for steps that need
Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import Step
from amanda_driver_torch.gradients.backward import Backward, keyed
from amanda_driver_torch.gradients.nodes import BackwardOp, new_nodes, routes
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.gradients.records import NodeRecord
from amanda_driver_torch.threads.state import AFTER_BACKWARD, BEFORE_BACKWARD
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import next_sequence
from amanda_driver_torch.torch_internals.tensor_attributes import are_base_tensors

__all__ = ["MANY", "are_native", "are_plain", "node_plans"]

# Calls with more values than this are executed in Python.
MANY = 16


def are_native(hooks: object) -> bool:
    """Return True for plans of nodes that the native interceptor follows without Python."""
    return native is not None and isinstance(hooks, native.NodePlans)


def node_plans(backward: Backward, call: OperatorCall, outputs: Sequence[Any]) -> object:
    """Return the plans of an op's nodes for executions like the last one.

    Args:
        backward: The backward program.
        call: The last one.
        outputs: Its outputs.

    Returns:
        The plans, by which nodes that have not been analysed yet are analysed when they run. None
        without the extension. If they are not possible, the epoch and the number of nodes.
    """
    session, watch, record, start = backward.session, backward.watch, call.record, call.start
    made = next_sequence() - start
    failed = (session.epoch, made)
    if native is None or watch is None:
        return None
    if record.hooks == failed or not outputs:
        return failed
    if not are_base_tensors(outputs):
        return failed
    nodes, leaves = new_nodes(outputs, start)
    planned = backward.planned_leaves(leaves)
    if not nodes:
        return None
    hooked: list[tuple[Any, NodeRecord]] = []
    for node, key in keyed(nodes):
        own = record.nodes.get(key)
        if own is None:
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
        hook = (backward.leaf_hook(), None) if own is None else _leaf_hook(backward, own)
        if hook is None:
            return failed
        hooks.append((number, leaf, *hook))
    return native.NodePlans(session.epoch, made, watch, *plans, None, places, hooks)


def _add_steps(
    backward: Backward, record: NodeRecord, number: int, plans: tuple[list[Any], list[Any]]
) -> bool:
    """Add the steps before and after a node to `plans`; return False if they need Python."""
    context, op = record.context, BackwardOp(record.site.op_type)
    points = BEFORE_BACKWARD, AFTER_BACKWARD
    if context is None or not record.analysed(backward.session):
        for hook, hooked in zip(backward.hooks(record), plans, strict=True):
            hooked.append((hook, [], number, None, op))
        return True
    if context.plan(points[0]).replacement is not None:
        return False
    for point, hook, hooked in zip(points, backward.hooks(record), plans, strict=True):
        steps = context.plan(point).steps
        if not are_plain(steps, MANY, differentiated=False):
            return False
        if steps:
            hooked.append((hook, steps, number, context.execution, op))
    return True


def _leaf_hook(
    backward: Backward, record: NodeRecord
) -> tuple[Callable[[Any], object], object] | None:
    """Return a function that hooks the accumulation into a leaf, and the plans by which C does so;
    None if that needs Python.
    """
    epoch = backward.session.epoch
    if record.planned is None or record.planned[0] != epoch:
        plans: tuple[list[Any], list[Any]] = [], []
        if not _add_steps(backward, record, 0, plans):
            return None
        made = native.NodePlans(epoch, 0, backward.watch, *plans, None, [], [], backward.life)
        record.planned = (epoch, backward.planned_hook(made.make), made)
    return record.planned[1:]


def are_plain(steps: Sequence[Step], count: int, *, differentiated: bool = True) -> bool:
    """Return True if C can call the routines of steps.

    Args:
        steps: The steps.
        count: The number of values that there are at least.
        differentiated: Whether the routines' operations may be differentiated.
    """
    for step in steps:
        action = step.action
        if (action.autodiff and not differentiated) or len(action.kwargs) > MANY // 2:
            return False
        positions = action.positions
        if positions and (min(positions) < 0 or max(positions) >= count):
            return False
    return True
