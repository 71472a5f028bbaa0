"""Plans in the form that the native interceptor executes.

Owns the decision which plans have that form: insertions before and after the forward op, and before
and after its backward (as a whole, or at one node), without autodiff. All others are executed by
`execute` and `_autograd.backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from amanda_core import OpContext, Plan, Step
from amanda_driver_torch._autograd.backward import Backward
from amanda_driver_torch._autograd.nodes import BackwardOp, Slot, new_nodes, routes, tensors_in
from amanda_driver_torch._autograd.operator_call import Call
from amanda_driver_torch._autograd.records import NodeRecord, OpRecord
from amanda_driver_torch._autograd.taps import Taps
from amanda_driver_torch._operators.bindings import FACTORIES, IN_PLACE_METADATA
from amanda_driver_torch._operators.overloads import KINDS
from amanda_driver_torch._thread.points import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BEFORE_BACKWARD,
    BEFORE_FORWARD,
)
from amanda_driver_torch._thread.state import STATE
from amanda_driver_torch._torch.extension import native
from amanda_driver_torch._torch.internals import (
    autocast_enabled,
    is_grad_enabled,
    next_sequence,
    saved_by,
    top_saved_tensor_hooks,
)
from amanda_driver_torch._torch.tensor_attributes import PLAIN, base_of, is_strided

__all__ = ["are_native", "compiled", "node_plans"]

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
    arriving: Plan,
    leaving: Plan,
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
        arriving: Its plan for the gradients of its outputs.
        leaving: Its plan for the gradients of its inputs.
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
        or arriving.replacement is not None
        or leaving.replacement is not None
        or (width := len(layout.sources)) > _MANY
        or not _are_plain(before.steps, width)
        or not _are_plain(after.steps, _MANY)
        or session.due(context, BEFORE_FORWARD, AFTER_FORWARD)
    ):
        return None
    on_gradients = bool(arriving.steps or leaving.steps)
    in_place = bound.signature.in_place
    assigns = in_place and call.operator.op_type == "__setitem__"
    # Without gradients there is nothing to differentiate.
    with_gradients = not any(step.action.autodiff for step in (*before.steps, *after.steps))
    edits_written = copies = False
    if in_place or not (layout.bound or call.operator.op_type in FACTORIES):  # It may write.
        if returned is None and in_place and not assigns:
            return None
        if taps is not None and on_gradients and not _is_written_whole(call):
            # The gradient of what it writes is not that of a new value.
            return None
        if edits_written := after.edits:
            # An op saves the same for backward if the same inputs require gradients. If its result
            # may be edited, it must be known what the op has saved of its argument.
            copies = call.saved is not None and any(call.saved)
            with_gradients = (
                with_gradients
                and call.saved is not None
                and (bound.signature.whole or assigns)
                and (not copies or len(call.saved) == _count_saved(call, returned))
            )
    if on_gradients and taps is None:
        with_gradients = False  # Nothing is known about them.
    if not with_gradients and is_grad_enabled():
        return None
    args, kwargs = bound.given
    if (on_gradients or edits_written) and not all(
        type(value) in PLAIN for value in (*tensors_in(args), *tensors_in(kwargs.values()))
    ):
        # A subclass may override attributes that C would read.
        return None
    names = tuple(kwargs)
    sources, attrs, outs = layout.numbered(len(args), names)
    operands = (*args, *kwargs.values())
    # The context shows attributes as they were in the execution that Python has seen.
    fixed = [(number, operands[number]) for number in attrs] if attrs else []
    if len(operands) > _MOST or (fixed and not all(type(value) in KINDS for _, value in fixed)):
        return None
    parts: Any = None
    if on_gradients or edits_written:
        found = _gradient_parts(
            call, context, sources, operands, arriving, leaving, edits_written, taps, returned
        )
        if found is None:
            return None
        parts, identities, values = found
        # Hooks of the program may have taken what was saved elsewhere before it can be copied.
        parts += (in_place and on_gradients, top_saved_tensor_hooks if copies else None)
        nodes = nodes - identities if nodes >= 0 else nodes
        fixed = fixed if values is None else values
    return native.Program(
        session.epoch,
        operands,
        names,
        sources,
        layout.defaults,
        before.steps,
        after.steps,
        context.execution,
        nodes,
        with_gradients,
        watch,
        context,
        bound.signature.mutated or None,
        call.operator.aliases,
        assigns,
        -1 if layout.spread is None else layout.spread,
        fixed,
        len(returned) if isinstance(returned, (tuple, list)) else 1,
        outs,
        parts,
    )


def _gradient_parts(
    call: Call,
    context: OpContext,
    sources: tuple[int, ...],
    operands: tuple[Any, ...],
    arriving: Plan,
    leaving: Plan,
    edits_written: bool,
    taps: Taps | None,
    returned: Any,
) -> Any:
    """Return what a program knows of gradients; None if it is not possible.

    Returns:
        Its parts; how many identities it does without; and arguments with the only values that it
        fits, or None for the usual ones.
    """
    tapped: list[Any] = []
    required: list[tuple[int, int, bool]] = []
    lengths: list[tuple[int, int]] = []
    node_hooks = arrivals = values = None
    identities = 0
    if leaving.steps or edits_written:
        required = [(number, item, one.requires_grad) for number, item, one in _tensors(operands)]
        lengths = [(i, len(v)) for i, v in enumerate(operands) if isinstance(v, (list, tuple))]
    if leaving.steps and taps is not None:
        node_hooks = _node_hooks(call, context, sources, operands, taps, returned)
        if node_hooks is not None:
            identities = taps.begin - call.start
            *node_hooks, permutes = node_hooks
            if permutes:
                # How depends on the arguments that are not tensors.
                values = [(i, v) for i, v in enumerate(operands) if not tensors_in([v])]
                if not all(type(v) in KINDS or _holds_integers(v) for _, v in values):
                    return None
                values = [(i, list(v) if type(v) is list else v) for i, v in values]
        else:
            given = None if taps.readable else taps.reusable_functions()
            if given is None:
                return None
            for function, slots in given:
                arguments = [_place_of(slot, sources, call.bound.layout.spread) for slot in slots]
                if any(argument < 0 for argument, _ in arguments):
                    return None
                tapped.append((function, arguments))
    if arriving.steps and taps is not None:
        arrivals = _arrivals(call, taps, call.outputs_of(returned))
        if arrivals is None:
            return None
    hooks = None if node_hooks is None else tuple(node_hooks)
    return (tapped, required, lengths, arrivals, hooks), identities, values


def _holds_integers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(type(item) is int for item in value)


def _count_saved(call: Call, returned: Any) -> int:
    """Return how many of the tensors that an op saved can be copied after it."""
    nodes, _ = new_nodes(call.made(call.outputs_of(returned)), call.start)
    return sum(1 for node in nodes for _ in saved_by(node))


def _is_written_whole(call: Call) -> bool:
    """Return True if a call writes its first argument, which is no view and keeps its shape."""
    written = call.values[0] if call.bound.signature.in_place and call.bound.bound else None
    return (
        type(written) is torch.Tensor
        and base_of(written) is None
        and call.operator.op_type not in IN_PLACE_METADATA
    )


def _tensors(operands: Sequence[Any]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the tensors among arguments, with the argument's number and the one in a list, or
    -1.
    """
    for argument, value in enumerate(operands):
        if isinstance(value, torch.Tensor):
            yield argument, -1, value
        elif isinstance(value, (list, tuple)):
            for item, one in enumerate(value):
                if isinstance(one, torch.Tensor):
                    yield argument, item, one


def _arrivals(call: Call, taps: Taps, outputs: Sequence[Any]) -> Any:
    """Return how to hook gradients of outputs; None if it is not possible."""
    found = taps.reusable_output_hooks(outputs)
    if found is None or not all(type(output) is torch.Tensor for output in outputs):
        return None
    hooks = []
    for hook, steps, numbers in found:
        # Routines at the node itself run after those, and so must be hooked after them.
        is_later = len(numbers) > 1 and call.session.wants_backward
        if is_later or not _are_plain(steps, len(outputs), differentiated=False):
            return None
        ways = [(position, -1, number, "") for position, number in numbers.items()]
        hooks.append((hook, steps, len(outputs), ways))
    made = {id(tensor) for tensor in call.made(outputs)}
    return [id(output) in made for output in outputs], hooks


def _node_hooks(
    call: Call,
    context: OpContext,
    sources: tuple[int, ...],
    operands: tuple[Any, ...],
    taps: Taps,
    returned: Any,
) -> Any:
    """Return how to hook gradients of inputs at the nodes that compute them; None if identities are
    needed.
    """
    outputs = call.outputs_of(returned)
    if not outputs or any(type(output) is not torch.Tensor for output in outputs):
        return None
    placed = list(_tensors(operands))
    if autocast_enabled() or not all(is_strided(tensor) for _, _, tensor in placed):
        return None
    gradient_nodes = taps.gradient_nodes(outputs[0])
    if gradient_nodes is None:
        return None
    hooks = []
    for one in gradient_nodes:
        arguments = [_place_of(slot, sources, call.bound.layout.spread) for slot in one.slots]
        if any(argument < 0 for argument, _ in arguments):
            return None
        if not _are_plain(one.steps, len(sources), differentiated=False):
            return None
        ways = [
            (position, -1 if item is None else item, result.number, result.way)
            for (position, item), result in zip(one.slots, one.results, strict=True)
        ]
        lengths = {p: len(call.values[p]) for p, item in one.slots if item is not None}
        hook = (one.hook, one.steps, one.route, len(sources), ways, list(lengths.items()))
        hooks.append((hook, arguments))
    made = call.made_count - (taps.begin - call.start)
    # The nodes that an op makes depend on more than the types of its arguments. The engine may
    # convert the op's gradients. A single node, whose type is compared, has the same results.
    changes = [way for hook, _ in hooks for *_, way in hook[4]]
    is_single = made == 1 and not any(changes)
    permutes = any(map(str.isdigit, changes))
    is_mixed = len({tensor.dtype for _, _, tensor in placed}) > 1
    edits = context.plan(BEFORE_FORWARD).edits
    depends = not is_single or edits
    laid = [
        # Dimensions of size one are moved.
        (argument, item, *_layout(value), _ones(value) if permutes else -1)
        for argument, item, value in (placed if depends else ())
        if is_mixed or edits or permutes or type(value) is torch.Tensor
    ]
    if edits and permutes:
        return None
    if edits and not _are_laid_alike(call.values, call.bound.values):
        made = -1  # C compares with the layouts before the edits, so Python hooks the nodes.
    # Autocast adds nodes, which are counted after the call.
    return (made, autocast_enabled if depends else None, laid, hooks, permutes)


def _ones(value: torch.Tensor) -> int:
    """Return the dimensions of size one as bits."""
    return sum(1 << dim for dim, size in enumerate(value.shape) if size == 1)


def _layout(value: torch.Tensor) -> tuple[int, bool, torch.dtype]:
    """Return what an op's nodes may depend on."""
    return value.ndim, value.is_contiguous(), value.dtype


def _are_laid_alike(edited: Sequence[Any], given: Sequence[Any]) -> bool:
    values = [value for *_, value in _tensors(edited)]
    return all(type(value) in PLAIN and is_strided(value) for value in values) and [
        _layout(value) for value in values
    ] == [_layout(value) for *_, value in _tensors(given)]


def _place_of(slot: Slot, sources: Sequence[int], spread: int | None) -> tuple[int, int]:
    """Return the number of an argument, and the item in it or -1; the number is -1 if there is
    none.
    """
    position, item = slot
    source = sources[position]
    if item is None or source < 0:
        return source, -1
    return (source + item, -1) if position == spread else (source, item)


def are_native(hooks: object) -> bool:
    """Return True for plans of nodes that the native interceptor follows without Python."""
    return native is not None and isinstance(hooks, native.NodePlans)


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
        The plans, by which nodes that have not been analysed yet are analysed when they run. None
        without the extension. If they are not possible, the epoch and the number of nodes.
    """
    session = backward.session
    made = next_sequence() - start
    failed = (session.epoch, made)
    if native is None or watch is None:
        return None
    if record.hooks == failed or not outputs:
        return failed
    if any(type(output) is not torch.Tensor for output in outputs):
        return failed
    nodes, leaves = new_nodes(outputs, start)
    planned = backward.planned_leaves(leaves)
    if not nodes:
        return None
    hooked: list[tuple[Any, NodeRecord]] = []
    for node, own in backward.record_of(record.nodes, nodes):
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
        hook = (backward.leaf_hook(), None) if own is None else _leaf_hook(backward, watch, own)
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
        if not _are_plain(steps, _MANY, differentiated=False):
            return False
        if steps:
            hooked.append((hook, steps, number, context.execution, op))
    return True


def _leaf_hook(
    backward: Backward, watch: Any, record: NodeRecord
) -> tuple[Callable[[Any], object], object] | None:
    """Return a function that hooks the accumulation into a leaf, and the plans by which C does so;
    None if that needs Python.
    """
    epoch = backward.session.epoch
    if record.planned is None or record.planned[0] != epoch:
        plans: tuple[list[Any], list[Any]] = [], []
        if not _add_steps(backward, record, 0, plans):
            return None
        made = native.NodePlans(epoch, 0, watch, *plans, None, [], [], backward.life)
        record.planned = (epoch, backward.planned_hook(made.make), made)
    return record.planned[1:]


def _are_plain(steps: Sequence[Step], count: int, *, differentiated: bool = True) -> bool:
    """Return True if C can call the routines of steps.

    Args:
        steps: The steps.
        count: The number of values that there are at least.
        differentiated: Whether the routines' operations may be differentiated.
    """
    for step in steps:
        action = step.action
        if (action.autodiff and not differentiated) or len(action.kwargs) > _MANY // 2:
            return False
        positions = action.positions
        if positions is not None and not all(0 <= position < count for position in positions):
            return False
    return True
