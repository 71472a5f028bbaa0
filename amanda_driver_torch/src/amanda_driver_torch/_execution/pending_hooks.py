"""Backward ops that are not hooked before the first of them is about to run.

Hooks on all backward ops of an operator cost many times what the operator does, and a program may
never run backward. Until a backward op of a forward op has been analysed, an execution gets one
hook only: before the node of its output, which runs before the op's other nodes do. When it is
called, that hook puts the others where they would stand if they had been registered in the forward
pass. Used by the native interceptor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_core import OpContext
from amanda_driver_torch._autograd.backward import Backward, unchanged
from amanda_driver_torch._autograd.lifetime import Token
from amanda_driver_torch._autograd.nodes import route
from amanda_driver_torch._autograd.records import NodeRecord, OpRecord
from amanda_driver_torch._autograd.taps import asked
from amanda_driver_torch._execution.native_plans import node_plans
from amanda_driver_torch._operators.signature import BoundCall
from amanda_driver_torch._torch.extension import native
from amanda_driver_torch._torch.internals import next_sequence
from amanda_driver_torch._torch.reading import node_of

__all__ = ["hook_at_once", "later_hooks"]

Hook = Callable[[Sequence[Any]], Any]


def later_hooks(
    backward: Backward,
    watch: Any,
    record: OpRecord,
    context: OpContext,
    bound: BoundCall,
    outputs: Sequence[Any],
    start: int,
    opened: bool = False,
) -> object:
    """Return how C hooks the nodes of an op in executions like the one that has just been.

    Args:
        backward: The backward program.
        watch: The extension's side of the interceptor, or None.
        record: The op's record.
        context: Its context.
        bound: The call.
        outputs: What the op returned.
        start: What `next_sequence` gave before it ran.
        opened: Whether the context was opened for this execution and will not be for the next ones,
            so that it has to forget some of the values first.
    """
    plans = node_plans(backward, watch, record, outputs, start)
    if plans is not None and not getattr(plans, "pending", False):
        return plans
    session = backward.session
    if native is None or watch is None or backward.second_order or not session.caching:
        return None
    if opened or bound.signature.mutated or len(outputs) != 1:
        return None
    # Nodes that are analysed while others never run are hooked as before.
    if asked(context) or any(one.analysed(session) for one in record.nodes.values()):
        return None
    output = outputs[0]
    node = node_of(output) if type(output) is torch.Tensor else None
    way = route(output, node, start) if node is not None else None
    if way is None or way[2] < 0:
        return None
    expand = _expansion(backward, record.nodes, context)
    made = next_sequence() - start
    return native.NodePlans(session.epoch, made, watch, [], [], (expand, way))


def _expansion(
    backward: Backward, records: dict[Any, NodeRecord], forward: OpContext
) -> Callable[[int, int, Any], Hook | None]:
    """Return a function that hooks the nodes of an execution, while the first of them is run.

    It takes the sequence number before the op ran, the number of the hook before that node, and the
    node, or None if it is being run. It returns what this hook does from now on; None if it is to
    be asked again next time. It holds neither records nor contexts, since hooks in a graph hold it.
    """
    held, lifetime, token = weakref.ref(backward), backward.lifetime, Token(backward.epoch())
    backward.pending[token] = records, forward

    def expand(start: int, number: int, node: Any) -> Hook | None:
        backward = held()
        if not lifetime.active() or backward is None:
            return None
        try:
            return backward.hook_pending(token, start, number, node)
        except Exception as error:
            failures, site = backward.session.failures, backward.pending[token][1].site
            if not failures.is_drivers(error):
                raise
            failures.note(error, site.namespace, site.name)
            return unchanged

    return expand


def hook_at_once(roots: Sequence[Any]) -> None:
    """Hook all nodes of a graph that wait for a backward pass.

    Compiled autograd collects the hooks before it runs, and then runs no node.

    Args:
        roots: Tensors, or edges (node, number).
    """
    if native is None:
        return
    queue = [node_of(root) if isinstance(root, torch.Tensor) else root[0] for root in roots]
    seen: set[Any] = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        handle = node.register_prehook(unchanged)  # There is no other way to see the hooks.
        for hook in list(handle.hooks_dict_ref().values()):
            if type(hook) is native.PendingHook:
                hook.expand(node)
        handle.remove()
        queue.extend(following for following, _ in node.next_functions)
