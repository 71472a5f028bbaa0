"""Hooks on the nodes of an execution: set as in an earlier one, by plans, or pending.

Hooks on all backward ops of an operator cost many times what the operator itself does, and a
program may never run backward. Until a backward op has been analysed, an execution gets a single
hook, before the node of its outputs, which runs before the op's other nodes. When that hook is
called, it sets the others in the order they would have had if they had been registered in the
forward pass. Where several nodes made the outputs, all are hooked by `node_plans`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amanda_core.driver_kit import OpContext
from amanda_driver_torch.execution.node_plans import node_plans
from amanda_driver_torch.gradients.backward import Backward
from amanda_driver_torch.gradients.node_hooks import Token, unchanged
from amanda_driver_torch.gradients.nodes import Place, roots
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.gradients.records import NodeRecord, OpRecord
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import next_sequence, sequence_number
from amanda_driver_torch.torch_internals.tensor_attributes import are_base_tensors, node_of

__all__ = ["hook_as_before", "hook_at_once", "hook_nodes"]

Hook = Callable[[Sequence[Any]], Any]
#: Takes the sequence number before the op ran, the number of the hook, and the node (None for the
#: node that is running). Returns the function of the hook from now on, or None to be called again.
Expand = Callable[[int, int, Any], Hook | None]


class LaterHooks:
    """Hooks the nodes of an op until they have been analysed, without native code.

    Args:
        epoch: The epoch in which this is valid.
        made: The number of nodes that the op must make for this to be valid.
        expand: Hooks the nodes of an execution.
        place: The node that runs first; see `routes`.
        written: Whether that is the node of what the op wrote (see `made`), which may be the base
            of its output.
    """

    pending = True

    def __init__(self, epoch: int, made: int, expand: Expand, place: Place, written: bool) -> None:
        self.expand, self.written = expand, written
        #: Whether nodes were hooked, so that they may have been analysed since.
        self.spent = False
        self._when = epoch, made
        self._kind: Any
        _, self._output, self._kind, self._number = place

    def hook(self, epoch: int, outputs: Sequence[Any], start: int) -> bool:
        """Register the hook of an execution; return False if the execution is unlike the earlier
        one.
        """
        if self.spent or self._when != (epoch, next_sequence() - start):
            return False
        node: Any = node_of(outputs[self._output]) if self._output < len(outputs) else None
        if type(node) is not self._kind or sequence_number(node) - start != self._number:
            return False
        hook = _PendingHook(self, start)
        hook.number = node.register_prehook(hook).id
        return True


class _PendingHook:
    """Hooks the nodes of an op when the first of them runs."""

    def __init__(self, later: LaterHooks, start: int) -> None:
        self._later, self._start, self.number = later, start, 0
        self._hook: Hook | None = None

    def expand(self, node: Any) -> None:
        if self._hook is None:
            self._hook = self._later.expand(self._start, self.number, node)
            self._later.spent |= self._hook is not None

    def __call__(self, grads: Sequence[Any]) -> Any:
        self.expand(None)
        return None if self._hook is None else self._hook(grads)


_PENDING_HOOKS = (_PendingHook,) if native is None else (_PendingHook, native.PendingHook)


def later_hooks(
    backward: Backward, call: OperatorCall, outputs: Sequence[Any], opened: bool = False
) -> object:
    """Return how to hook the nodes of an op in executions like the one that has just taken place.

    Args:
        backward: The backward program.
        call: The call that has just been executed.
        outputs: Its outputs.
        opened: Whether the context was opened for this execution and will not be for the next ones.
            It must then release some of its values first.
    """
    session, record, start = backward.session, call.record, call.start
    analysed = [one.analysed(session) for one in record.nodes.values()]
    if backward.second_order or not session.caching or (opened and not all(analysed)):
        return None
    tensors = call.made(outputs)
    places = {id(output): index for index, output in enumerate(outputs)}
    written = not places.keys() >= {id(tensor) for tensor in tensors}
    if not are_base_tensors((*tensors, *outputs)):
        return None
    first = roots(tensors, start)
    if any(analysed) or len(first) != 1:
        # The node of a view that was written must not be read.
        return None if written else node_plans(backward, call, outputs)
    node, count = first[0], next_sequence() - start
    origin = next(tensor for tensor in tensors if node_of(tensor) is node)
    edge = tensors.index(origin) if written else places[id(origin)]
    place: Place = (-1, edge, type(node), sequence_number(node) - start)
    assert record.context is not None
    expand = _expansion(backward, record.nodes, record.context)
    if native is None or backward.watch is None or written:
        return LaterHooks(session.epoch, count, expand, place, written)
    return native.NodePlans(session.epoch, count, backward.watch, [], [], (expand, [place]))


def _expansion(backward: Backward, records: dict[Any, NodeRecord], forward: OpContext) -> Expand:
    """Return a function that hooks the nodes of an execution while the first of them runs.

    It holds neither records nor contexts, since hooks in a graph hold it.
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
            site = backward.pending[token][1].site
            backward.session.failures.report(error, site.namespace, site.name)
            return unchanged

    return expand


def hook_as_before(
    backward: Backward,
    record: OpRecord,
    outputs: Sequence[Any],
    start: int,
    call: OperatorCall | None = None,
) -> bool:
    """Set hooks as in an earlier execution; return False if this one is unlike it.

    Args:
        backward: The backward program.
        record: The op's record.
        outputs: The op's outputs.
        start: Sequence number before it ran.
        call: The call, if its arguments are bound.
    """
    hooks: Any = record.hooks
    if (
        hooks is None
        or isinstance(hooks, tuple)
        or backward.second_order
        or not backward.session.caching
    ):
        return False
    if isinstance(hooks, LaterHooks) and hooks.written:
        if call is None:
            return False
        outputs = call.made(outputs)
    return are_base_tensors(outputs) and hooks.hook(backward.session.epoch, outputs, start)


def hook_nodes(
    backward: Backward,
    call: OperatorCall,
    outputs: Sequence[Any],
    opened: bool = False,
    is_unlike: bool = False,
) -> bool:
    """Set hooks on the op's nodes; return True if they need none in this epoch.

    Args:
        backward: The backward program.
        call: The call that has just been executed.
        outputs: Its outputs.
        opened: As for `later_hooks`.
        is_unlike: Whether it is known to be unlike earlier executions.
    """
    record = call.record
    # Plans of nodes set their hooks after those for gradients of inputs, which must run later.
    ordered = not call.tapped or getattr(record.hooks, "pending", False)
    if ordered and not is_unlike and hook_as_before(backward, record, outputs, call.start, call):
        return False
    planned = ordered and _plan(backward, call, outputs)
    if planned and hook_as_before(backward, record, outputs, call.start, call):
        return False
    assert record.context is not None
    made = call.made(outputs)
    if backward.track(record.nodes, record.context, made, call.start, tapped=call.tapped):
        return True
    if not planned:
        record.hooks = later_hooks(backward, call, outputs, opened)
    return False


def _plan(backward: Backward, call: OperatorCall, outputs: Sequence[Any]) -> bool:
    """Make the plans of the op's nodes if all of them were analysed; return False otherwise.

    If they all need no hook, there are no plans.
    """
    nodes, session = call.record.nodes.values(), backward.session
    if all(n.idle(session) for n in nodes) or not all(n.analysed(session) for n in nodes):
        return False
    call.record.hooks = later_hooks(backward, call, outputs)
    return True


def hook_at_once(roots: Sequence[Any]) -> None:
    """Set all pending hooks of a graph.

    Compiled autograd collects the hooks before it runs, and then runs no node.

    Args:
        roots: Tensors, or edges (node, number).
    """
    queue = [node_of(root) if isinstance(root, torch.Tensor) else root[0] for root in roots]
    seen: set[Any] = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        handle = node.register_prehook(unchanged)  # The only way to read the hooks.
        for hook in list(handle.hooks_dict_ref().values()):
            if isinstance(hook, _PENDING_HOOKS):
                hook.expand(node)
        handle.remove()
        queue.extend(following for following, _ in node.next_functions)
