"""What a compiled graph cannot have, so that the frame runs eagerly; what operators return.

Owns the reasons that depend on one operator. Those of a whole graph or callable are in `graph` and
`callbacks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amanda_core.driver_kit import OpContext, Step
from amanda_core.interface import UnsupportedError
from amanda_driver_torch.compiled.choice import CannotWeave
from amanda_driver_torch.compiled.execution import OpPlan
from amanda_driver_torch.compiled.host import like_of
from amanda_driver_torch.execution.native_plans import refusals
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.operators.bindings import IN_PLACE_METADATA
from amanda_driver_torch.operators.operator import Operator
from amanda_driver_torch.operators.signature import BoundCall, outputs_of
from amanda_driver_torch.torch_internals.dynamo import tree_leaves

__all__ = ["REFUSALS", "check", "does_nothing", "likes", "not_exported"]


def not_exported(why: str) -> UnsupportedError:
    """Return the error of a model that cannot be exported with the edits of tools."""
    return UnsupportedError(
        f"The model cannot be exported with the edits of the tools: {why}",
        where="amanda.exported",
        fix="Export tools whose edits are marked with amanda.staged, and a model that "
        "torch.compile(fullgraph=True) compiles",
    )


def does_nothing(operator: Operator, func: Any, bound: BoundCall, outputs: Sequence[Any]) -> bool:
    """Return True if an operator returns its input, such as `contiguous`."""
    if bound.signature.mutated or bound.out is not None:
        return False
    if "dropout" in operator.op_type:
        # Dynamo shows a copy where the operator itself, without dropping, makes none.
        args, kwargs = bound.given
        outputs = outputs_of(func(*args, **kwargs))
    inputs = {id(tensor) for tensor in tensors_in(bound.values)}
    return any(id(tensor) in inputs for tensor in tensors_in(outputs))


def likes(outputs: Sequence[Any]) -> list[Any]:
    """Return tensors like the outputs; an empty list if one of them is not a tensor."""
    are_known = all(
        isinstance(value, torch.Tensor) and all(type(n) is int for n in value.shape)
        for value in outputs
    )
    return list(map(like_of, outputs)) if are_known else []


#: The reasons, in the order in which they are asked for.
REFUSALS = refusals(
    writes_out="a tool edits an operator with `out=`, or requests its gradients",
    edits_beside="a tool edits a tensor that an operator writes beside its result",
    rewrites="a tool edits an operator that changes the shape of an argument, or writes a list",
    replaces_others="a tool replaces the backward of an operator with outputs that are not tensors",
    has_nested_lists="a tool requests gradients of an operator with lists of lists of tensors",
    gets_truth_value="a routine on the host gets a symbolic truth value",
    gets_nested_tensor="a routine on the host gets a nested tensor",
    asks_for_varying_weights="a routine on the host asks for a weight that may be another one each "
    "time",
    has_unknown_results="a replacement on the host has outputs of unknown shape",
    has_dynamic_shapes="a routine on the host is differentiated, and shapes are dynamic",
    loses_gradients="a routine on the host is differentiated, and gets no value that requires a "
    "gradient: those of parameters of its own would be lost",
)


class _Facts:
    """Facts about an operator of a graph that decide whether its plans can be woven in."""

    def __init__(
        self, context: OpContext, plan: OpPlan, bound: BoundCall, outputs: Sequence[Any]
    ) -> None:
        self._plan, self._values, self._outputs = plan, bound.values, outputs
        changes, signature = plan.changes, bound.signature
        self.writes_out = changes and bound.out is not None
        self.edits_beside = changes and self._edits(signature.mutated - {0})
        self.rewrites = changes and signature.in_place and self._rewrites(context.op_type)
        passed = (v for step in plan.steps_on_host for v in step.action.kwargs.values())
        self.asks_for_varying_weights = any(value is context for value in passed) and any(
            weight.varies for weight in context.weights.values()
        )
        step = plan.before.replacement
        self.has_unknown_results = step and not (step.action.staged or plan.outputs)
        values = (*bound.values, *outputs)
        leaves = tree_leaves(values) if plan.on_host else []
        self.gets_truth_value = any(isinstance(value, torch.SymBool) for value in leaves)
        self.gets_nested_tensor = any(isinstance(v, torch.Tensor) and v.is_nested for v in leaves)
        self.replaces_others = self.has_nested_lists = False
        self.has_dynamic_shapes = self.loses_gradients = False
        if torch.is_grad_enabled():
            self._read_gradients(plan, values)

    def _read_gradients(self, plan: OpPlan, values: Sequence[Any]) -> None:
        got = self._differentiated()
        self.loses_gradients = not all(any(t.requires_grad for t in tensors) for tensors in got)
        if not any(tensor.requires_grad for tensor in tensors_in(self._values)):
            return
        self.has_dynamic_shapes = bool(got) and not likes(tensors_in(values))
        if plan.arriving.replacement:
            self.replaces_others = not all(isinstance(o, torch.Tensor) for o in self._outputs)
        if plan.arriving or plan.leaving:
            self.has_nested_lists = any(map(_is_nested, values))

    def _edits(self, positions: frozenset[int]) -> bool:
        steps = [step for step in self._plan.before.steps if not step.action.observe]
        return any(not positions.isdisjoint(_chosen(step, self._values)) for step in steps)

    def _rewrites(self, op_type: str) -> bool:
        written, outputs, plan = self._values[0], self._outputs, self._plan
        if op_type in IN_PLACE_METADATA or not isinstance(written, torch.Tensor):
            return True
        if not (outputs or plan.before.replacement or plan.arriving.replacement):
            return False
        return len(outputs) != 1 or outputs[0] is not written

    def _differentiated(self) -> list[list[torch.Tensor]]:
        """Return the tensors that each routine on the host gets whose code is differentiated."""
        plan, values = self._plan, self._values
        steps = [
            *((one, values) for one in plan.before.steps if one.action.autodiff),
            *((one, self._outputs) for one in plan.after.steps if one.action.autodiff),
            *([(plan.before.replacement, values)] if plan.before.replacement else []),
        ]
        return [
            tensors_in(given[i] for i in _chosen(one, given) if i < len(given))
            for one, given in steps
            if not (one.action.staged or one.action.observe)
        ]


def check(context: OpContext, plan: OpPlan, bound: BoundCall, outputs: Sequence[Any]) -> None:
    """Raise `CannotWeave` for what a compiled graph cannot have."""
    facts = _Facts(context, plan, bound, outputs)
    for refusal in REFUSALS:
        if refusal.applies(facts):
            raise CannotWeave(f"{refusal.why} ({context.name})")


def _chosen(step: Step, values: Sequence[Any]) -> Sequence[int]:
    chosen = step.action.positions
    return range(len(values)) if chosen is None else chosen


def _is_nested(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(one, (list, tuple)) and tensors_in(one) for one in value
    )
