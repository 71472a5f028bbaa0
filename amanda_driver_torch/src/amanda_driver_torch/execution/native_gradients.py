"""The gradients of an op in the form in which the native interceptor hooks and edits them.

Owns which hooks C sets in further executions, at which nodes and identities, and by which facts
about the arguments it recognizes an execution that makes the same nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from amanda_driver_torch.execution.node_plans import are_plain
from amanda_driver_torch.gradients.nodes import Slot, by_slot, tensors_in
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.gradients.output_taps import reusable_output_hooks
from amanda_driver_torch.gradients.taps import NodeGradients, Taps
from amanda_driver_torch.operators.overloads import KINDS
from amanda_driver_torch.torch_internals.internals import autocast_enabled
from amanda_driver_torch.torch_internals.native_fields import GradientFields
from amanda_driver_torch.torch_internals.tensor_attributes import (
    PLAIN,
    are_base_tensors,
    is_strided,
)

__all__ = ["GradientParts", "gradient_parts"]


class GradientParts(NamedTuple):
    """What a program knows of gradients.

    Attributes:
        parts: Its parts.
        identities: How many identities it does without.
        values: Arguments with the only values that it fits, or None for the usual ones.
    """

    parts: GradientFields
    identities: int = 0
    values: list[tuple[int, Any]] | None = None


def gradient_parts(
    call: OperatorCall,
    sources: Sequence[int],
    operands: tuple[Any, ...],
    taps: Taps | None,
    edits_written: bool,
) -> GradientParts | None:
    """Return what a program knows of gradients; None if it is not possible.

    Args:
        call: The execution that has just taken place.
        sources: The numbers of the arguments at the op's positions, -1 for none.
        operands: The arguments.
        taps: The aligned gradients of that execution, if it had gradients.
        edits_written: Whether what the op writes may be edited after it.
    """
    required: list[tuple[int, int, bool]] = []
    lengths: list[tuple[int, int]] = []
    if call.leaving.steps or edits_written:
        required = [(number, item, one.requires_grad) for number, item, one in _tensors(operands)]
        lengths = [(i, len(v)) for i, v in enumerate(operands) if isinstance(v, (list, tuple))]
    tapped: list[Any] | None = []
    arrivals: tuple[Any, ...] | None = ()
    hooks = values = None
    identities = 0
    if taps is not None and call.leaving.steps:
        node_hooks = _node_hooks(call, sources, operands, taps)
        if node_hooks is None:
            tapped = _tapped(call, sources, taps)
        else:
            hooks, identities = node_hooks[:4], taps.begin - call.start
            values = _values_besides_tensors(operands) if node_hooks.permutes else None
            if node_hooks.permutes and values is None:
                return None
    if taps is not None and call.arriving.steps:
        arrivals = _arrivals(call)
    if tapped is None or arrivals is None:
        return None
    fields = GradientFields(tapped, required, lengths, arrivals or None, hooks)
    return GradientParts(fields, identities, values)


def _values_besides_tensors(operands: Sequence[Any]) -> list[tuple[int, Any]] | None:
    """Return the arguments that are not tensors, with their numbers; None if C cannot compare
    them.
    """
    values = [(i, v) for i, v in enumerate(operands) if not tensors_in([v])]
    if not all(type(v) in KINDS or _holds_integers(v) for _, v in values):
        return None
    return [(i, list(v) if type(v) is list else v) for i, v in values]


def _holds_integers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(type(item) is int for item in value)


def _tensors(operands: Sequence[Any]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the tensors among arguments, with the argument's number and the one in a list, or
    -1.
    """
    for (argument, item), value in by_slot(operands):
        yield argument, -1 if item is None else item, value


def _places(
    call: OperatorCall, slots: Sequence[Slot], sources: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return for each slot the number of an argument, and the item in it or -1; None if one has no
    argument.
    """
    found = []
    for position, item in slots:
        source = sources[position]
        if source < 0:
            return None
        if item is None:
            found.append((source, -1))
        elif position == call.bound.layout.spread:
            found.append((source + item, -1))
        else:
            found.append((source, item))
    return found


def _tapped(call: OperatorCall, sources: Sequence[int], taps: Taps) -> list[Any] | None:
    """Return the functions of the identities of inputs, each with its arguments; None if they are
    not possible.
    """
    given = None if taps.readable else taps.reusable_functions()
    if given is None:
        return None
    tapped = [(function, _places(call, slots, sources)) for function, slots in given]
    return None if any(places is None for _, places in tapped) else tapped


def _arrivals(call: OperatorCall) -> tuple[list[bool], list[Any]] | None:
    """Return how to hook gradients of outputs; None if it is not possible."""
    outputs = call.outputs_of(call.returned)
    found = reusable_output_hooks(call.execution.backward, call, outputs)
    if found is None or not are_base_tensors(outputs):
        return None
    hooks = []
    for hook, steps, numbers in found:
        # Routines at the node itself run after those, and so must be hooked after them.
        is_later = len(numbers) > 1 and call.session.wants_backward
        if is_later or not are_plain(steps, len(outputs), differentiated=False):
            return None
        ways = [(position, -1, number, "") for position, number in numbers.items()]
        hooks.append((hook, steps, len(outputs), ways))
    made = {id(tensor) for tensor in call.made(outputs)}
    return [id(output) in made for output in outputs], hooks


class _NodeHooks(NamedTuple):
    """How to hook gradients of inputs at the nodes that compute them.

    Attributes:
        made: How many nodes the op must have made; -1 if Python hooks them.
        autocast: Returns True if autocast adds nodes, or None if that does not matter.
        laid: The layouts that tensors must have.
        hooks: The hooks, each with the arguments whose gradients it changes.
        permutes: Whether they permute dimensions.
    """

    made: int
    autocast: Any
    laid: list[Any]
    hooks: list[Any]
    permutes: bool


def _node_hooks(
    call: OperatorCall, sources: Sequence[int], operands: tuple[Any, ...], taps: Taps
) -> _NodeHooks | None:
    """Return how to hook gradients of inputs at the nodes; None if identities are needed."""
    outputs = call.outputs_of(call.returned)
    if not (outputs and are_base_tensors(outputs)):
        return None
    placed = list(_tensors(operands))
    if autocast_enabled() or not all(is_strided(tensor) for _, _, tensor in placed):
        return None
    gradient_nodes = taps.gradient_nodes(outputs[0])
    if gradient_nodes is None:
        return None
    hooks = [_hook_of(call, one, sources) for one in gradient_nodes]
    if None in hooks:
        return None
    made = call.made_count - (taps.begin - call.start)
    # The nodes that an op makes depend on more than the types of its arguments. The engine may
    # convert the op's gradients. A single node, whose type is compared, has the same results.
    changes = [result.way for one in gradient_nodes for result in one.results]
    permutes = any(map(str.isdigit, changes))
    edits = call.before.edits
    if edits and permutes:
        return None
    depends = made != 1 or any(changes) or edits
    laid = _layouts(placed, edits, permutes) if depends else []
    if edits and not _are_laid_alike(call.values, call.bound.values):
        made = -1  # C compares with the layouts before the edits, so Python hooks the nodes.
    # Autocast adds nodes, which are counted after the call.
    return _NodeHooks(made, autocast_enabled if depends else None, laid, hooks, permutes)


def _layouts(placed: Sequence[Any], edits: bool, permutes: bool) -> list[Any]:
    """Return the layouts of tensors, with their places among the arguments."""
    every = edits or permutes or len({tensor.dtype for _, _, tensor in placed}) > 1
    return [
        # Dimensions of size one are moved.
        (argument, item, *_layout(value), _ones(value) if permutes else -1)
        for argument, item, value in placed
        if every or type(value) is torch.Tensor
    ]


def _hook_of(call: OperatorCall, one: NodeGradients, sources: Sequence[int]) -> Any:
    """Return the hook of a node and its arguments; None if C cannot set it."""
    arguments = _places(call, one.slots, sources)
    if arguments is None or not are_plain(one.steps, len(sources), differentiated=False):
        return None
    ways = [
        (position, -1 if item is None else item, result.number, result.way)
        for (position, item), result in zip(one.slots, one.results, strict=True)
    ]
    lengths = {p: len(call.values[p]) for p, item in one.slots if item is not None}
    return (one.hook, one.steps, one.route, len(sources), ways, list(lengths.items())), arguments


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
