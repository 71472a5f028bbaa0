"""The backward operators of an operator of a graph, and the plans of their gradients.

An operator makes the same nodes on fake tensors as where a backend traces it. So a run on fake
tensors finds them, and hooks analyse them there. Where a backend traces the operator and then its
gradients, hooks on the same nodes write the steps of the plans into the backward program. Owns
these hooks, and those on the accumulation of gradients, which a compiled program leaves to the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from amanda_core.driver_kit import OpContext, Plan
from amanda_core.interface import IPoint
from amanda_driver_torch.compiled.choice import CannotWeave
from amanda_driver_torch.compiled.host import Host
from amanda_driver_torch.gradients.backward import keyed, site_of
from amanda_driver_torch.gradients.nodes import BackwardOp, new_nodes, tensors_in
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.dynamo import FunctionalTensor
from amanda_driver_torch.torch_internals.internals import next_sequence

__all__ = ["BackwardOperators", "watching_leaves"]

#: Identifies a node among those that an operator made, as in `keyed`.
Key = tuple[str, str, int]
#: Nodes that fake tensors and AOTAutograd make -> the same ones of eager mode.
_NAMES = {"NativeBatchNormLegitBackward0": "NativeBatchNormBackward0"}
_NAMES_OF_ALIASES = _NAMES | {"ViewBackward0": "ReshapeAliasBackward0"}
#: The node that a graph has for an `autograd.Function`.
_TEMPLATE = "ApplyTemplateBackward"
_RESHAPING = frozenset({"flatten", "reshape", "reshape_as"})
_POINTS = IPoint.BEFORE_BACKWARD, IPoint.AFTER_BACKWARD
#: Applies the steps of a plan to gradients.
Fold = Callable[[Plan, list[Any]], list[Any]]


class BackwardOperators:
    """The backward operators of one operator of a graph.

    Args:
        host: Has the session.
        forward: The operator's context.
        analyse: Runs the analysis at a point of a context that is open, and returns the plan.
        closed: Why routines find no values in the contexts.

    Attributes:
        opened: The contexts of those that were analysed.
        plans: The plans of each, by point.
    """

    def __init__(
        self,
        host: Host,
        forward: OpContext,
        analyse: Callable[[OpContext, IPoint], Plan],
        closed: str,
    ) -> None:
        self._host, self._forward = host, forward
        self._analyse, self._closed = analyse, closed
        self.opened: list[OpContext] = []
        self.plans: dict[Key, dict[IPoint, Plan]] = {}
        self._are_known = False
        self._names = _NAMES_OF_ALIASES if _makes_alias(forward) else _NAMES
        if isinstance(forward.get_op(), type):
            self._names = {**self._names, _TEMPLATE: f"{forward.op_type}Backward"}

    def __bool__(self) -> bool:
        return not self._are_known or any(self) or self._is_incomplete

    def __iter__(self) -> Iterator[Plan]:
        return (plan for plans in self.plans.values() for plan in plans.values())

    @property
    def _is_incomplete(self) -> bool:
        """True if some nodes did not run and were not analysed."""
        return any(len(plans) < len(_POINTS) for plans in self.plans.values())

    def settle(self) -> None:
        """Expect the same nodes from now on."""
        self._are_known = True

    def hook(self, made: Sequence[torch.Tensor], start: int, fold: Fold) -> None:
        """Register hooks on the nodes of an execution.

        Args:
            made: The tensors that the operator made or wrote.
            start: The value of `next_sequence` before it ran.
            fold: Applies the steps of a plan.

        Raises:
            CannotWeave: They are not those that were analysed.
        """
        nodes = {key: node for node, key in keyed(new_nodes(made, start)[0], names=self._names)}
        if not self._are_known:
            self.plans |= {key: {} for key in nodes}
        elif nodes and (nodes.keys() != self.plans.keys() or self._is_incomplete):
            self._refuse(made, ", ".join(sorted(name for _, name, _ in nodes)))
        for key, node in nodes.items():
            if not self._are_known or any(self.plans.get(key, {}).values()):
                node.register_prehook(partial(self._before, key, fold))
                node.register_hook(partial(self._after, key, fold))

    def _before(self, key: Key, fold: Fold, gradients: Sequence[Any]) -> Sequence[Any] | None:
        plan = self._plan(key, IPoint.BEFORE_BACKWARD, grad_outputs=list(gradients))
        return tuple(fold(plan, list(gradients))) if plan else None

    def _after(
        self, key: Key, fold: Fold, results: Sequence[Any], gradients: Sequence[Any]
    ) -> Sequence[Any] | None:
        given = {"grad_outputs": list(gradients), "grad_inputs": list(results)}
        plan = self._plan(key, IPoint.AFTER_BACKWARD, **given)
        return tuple(fold(plan, list(results))) if plan else None

    def _refuse(self, made: Sequence[torch.Tensor], names: str) -> None:
        name = self._forward.name
        if any(isinstance(tensor, FunctionalTensor) for tensor in made):
            raise CannotWeave(f"the backend differentiates {name} by {names}")
        # The program runs already: a backend without AOTAutograd traces nothing.
        self._host.session.note_inside(name, f"it is differentiated by {names}")

    def _plan(self, key: Key, point: IPoint, **values: list[Any]) -> Plan:
        """Return the plan of a backward operator at a point; analyse it first if that is due."""
        found = self.plans[key]
        if not self._are_known and point not in found:
            site = site_of(self._forward, key)
            op = BackwardOp(site.op_type)
            context = self._host.session.open(site, op, forward=self._forward, backward=True)
            self.opened.append(context)
            try:
                context.execution |= values
                found[point] = self._analyse(context, point)
            finally:
                context.release()
                context.execution |= {"closed": self._closed, "op": op}
            if found[point].replacement is not None:
                raise CannotWeave(f"a tool replaces a single backward operator ({context.name})")
        return found[point]


def _makes_alias(forward: OpContext) -> bool:
    """Return True if an operator reshapes a tensor in eager mode without `view`."""
    if forward.op_type not in _RESHAPING:
        return False
    first, *_ = forward.get_inputs()
    return isinstance(first, torch.Tensor) and not first.is_contiguous()


def watching_leaves(
    compiled: Callable[..., Any], place: Callable[[], int] = lambda: 0
) -> Callable[..., Any]:
    """Return compiled code after which the accumulation of gradients is analysed and hooked.

    Args:
        compiled: The code.
        place: Returns the number of the place that calls it, of those that share the code.
    """
    #: Places where nothing is inserted in the epoch of this code.
    settled: set[int] = set()

    def call(*args: Any) -> Any:
        if (here := place()) in settled:
            return compiled(*args)
        start = next_sequence()
        found = compiled(*args)
        if (attachment := STATE.attachment) is not None:
            _, leaves = new_nodes(tensors_in(found), start)
            if attachment.backward.track_leaves(leaves):
                settled.add(here)
        return found

    return call
