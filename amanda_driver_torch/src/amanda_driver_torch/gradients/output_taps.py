"""Aligned gradients of an op's outputs: hooks on the outputs, or on the node that made them.

Owns which of these serve for outputs that are requested together. An identity node is made over
outputs of several nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from amanda_core.driver_kit import Plan, Step
from amanda_core.interface import UnsupportedError
from amanda_driver_torch.gradients.backward import Backward
from amanda_driver_torch.gradients.driver_nodes import tap
from amanda_driver_torch.gradients.gradient_functions import (
    concerns,
    gradient_function,
    requested_together,
)
from amanda_driver_torch.gradients.gradient_hooks import outputs_prehook, tensor_hook, view_prehook
from amanda_driver_torch.gradients.nodes import Slot, differentiable, placed, tensors_in
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.gradients.view_regions import ViewRegion
from amanda_driver_torch.torch_internals.tensor_attributes import (
    base_of,
    is_strided,
    node_of,
    output_number,
    without_overrides,
)

__all__ = ["OutputGradients", "region_of", "reusable_output_hooks", "tap_outputs"]


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


def tap_outputs(backward: Backward, call: OperatorCall, outputs: list[Any]) -> list[Any]:
    """Attach the routines for gradients of outputs, and return the outputs to use.

    This happens before the op's nodes are hooked, so that routines of the aligned view run
    first.
    """
    plan = call.arriving
    token = backward.keep(plan)
    region = region_of(call)
    if region is not None:
        function = gradient_function(backward, token, frozenset({0}), [(0, None)], outputs)
        # The view's own node does not exist yet. Its gradient arrives through the base.
        base = base_of(call.values[0])
        assert base is not None
        node_of(base).register_prehook(view_prehook(function, region))
        return outputs
    roots = {_root(t) for t in tensors_in(call.values)}
    for group, slots in _output_groups(call, plan, outputs):
        chosen = list(slots)
        function = gradient_function(backward, token, group, chosen, outputs)
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
            what = f"gradients of outputs {sorted(group)} of {call.context.name!r}"
            backward.unseen[what] = (
                "they go to several backward ops of this op, which an observer must not change"
            )
            continue
        if any(base_of(t) is not None and _root(t) in roots for t in arriving):
            raise UnsupportedError(
                "The gradients of these outputs go to several backward ops of this op",
                where=f"insert_before_backward_op, {call.context.where}",
                fix="Insert for one output at a time, since the outputs are views of an input",
            )
        identities = tap([slots[slot] for slot in chosen], function)
        outputs = placed(outputs, chosen, identities)
    return outputs


def reusable_output_hooks(
    backward: Backward, call: OperatorCall, outputs: Sequence[Any]
) -> list[OutputGradients] | None:
    """Return hooks for gradients of outputs that further executions can reuse.

    After the gradients, a hook accepts the results of its first steps' routines. Returns None
    if an execution needs more.
    """
    plan, found = call.arriving, []
    token = backward.keep(plan)
    for group, chosen in _output_groups(call, plan, outputs):
        function = gradient_function(backward, token, group, list(chosen), outputs)
        steps = [step for step in plan.steps if concerns(step, group)]
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
    call: OperatorCall, plan: Plan, outputs: Sequence[Any]
) -> list[tuple[frozenset[int], dict[Slot, torch.Tensor]]]:
    """Return the outputs whose gradients are requested together."""
    inputs = {id(t) for t in tensors_in([*call.bound.values, *call.values])}
    slots = {
        slot: tensor
        for slot, tensor in differentiable(outputs).items()
        # An output that is an input has no node of this op, and so no gradient.
        if call.bound.signature.in_place or id(tensor) not in inputs
    }
    return [
        (group, {slot: tensor for slot, tensor in slots.items() if slot[0] in group})
        for group in requested_together(plan, slots)
    ]


def region_of(call: OperatorCall) -> ViewRegion | None:
    """Return the region in the base, if the op wrote a view in place."""
    view = call.values[0] if call.bound.signature.in_place else None
    if not (isinstance(view, torch.Tensor) and is_strided(view)):
        return None
    base = base_of(view)
    if base is None or not is_strided(base):
        return None
    # A base without a node has no recorded gradient.
    return ViewRegion(view) if node_of(base) is not None else None


def _root(tensor: torch.Tensor) -> int:
    """Return the id of the base of a view; of another tensor, its own id."""
    base = base_of(tensor)
    return id(tensor if base is None else base)
