"""Plans in the form in which the native interceptor runs them by itself.

Owns the question which plans it can: insertions before and after the forward op, without autodiff,
and before and after the backward op as a whole. All others are executed by `_execute`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amanda_core import IPoint, OpContext, Plan, Step
from amanda_driver_torch._build import native
from amanda_driver_torch._state import STATE
from amanda_driver_torch._taps import asked

if TYPE_CHECKING:
    from amanda_driver_torch._execute import Run
    from amanda_driver_torch._taps import Taps

__all__ = ["compiled"]

# More values than this are handed over in Python.
_MANY = 16


def compiled(
    run: Run,
    context: OpContext,
    before: Plan,
    after: Plan,
    nodes: int,
    taps: Taps | None,
    returned: Any,
) -> object:
    """The plan of an op as a program for calls like that of `run`; None where it cannot be.

    Args:
        run: The execution that has just taken place.
        context: The op's context.
        before: Its plan before forward.
        after: Its plan after forward.
        nodes: Number of backward nodes that the op made, if these need nothing more; else -1.
        taps: The aligned gradients of that execution, if it had gradients.
        returned: What the op returned.
    """
    session, bound, attachment = run.session, run.bound, run.attachment
    layout = bound.layout
    if (
        native is None
        or attachment.watch is None
        or STATE.recomputing
        or before.replacement is not None
        or context.plan(IPoint.BEFORE_BACKWARD).replacement is not None
        or context.plan(IPoint.AFTER_BACKWARD).replacement is not None
        or bound.signature.in_place
        or not layout.bound
        or layout.attrs
        or layout.outs
        or layout.fresh
        or layout.spread is not None
        or len(layout.sources) > _MANY
        or session.due(context, IPoint.BEFORE_FORWARD)
        or session.due(context, IPoint.AFTER_FORWARD)
    ):
        return None
    steps = [_parts(step, len(layout.sources)) for step in before.steps]
    steps_after = [_parts(step, _MANY) for step in after.steps]
    if None in steps or None in steps_after:
        return None
    args, kwargs = bound.given
    names = tuple(kwargs)
    sources = tuple(_argument(source, len(args), names) for source in layout.sources)
    operands = (*args, *kwargs.values())
    tapped: list[Any] = []
    required: tuple[int, ...] = ()
    if context.plan(IPoint.AFTER_BACKWARD):
        given = taps.given() if taps is not None else []
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
    arrivals: list[Any] = []
    if context.plan(IPoint.BEFORE_BACKWARD) and taps is not None:
        if not isinstance(returned, torch.Tensor):
            return None
        for hook, hooked in taps.arriving():
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
        vars(context),
        context._values,
        attachment.constant,
        nodes,
        tapped,
        required,
        # Found without gradients, nothing is known of them.
        taps is not None or not asked(context),
        attachment.watch,
        arrivals,
    )


def _argument(source: int | str | None, count: int, names: tuple[str, ...]) -> int:
    """Number of an argument, keyword arguments counted last; -1 where there is none."""
    if source is None:
        return -1
    return count + names.index(source) if isinstance(source, str) else source


def _parts(step: Step, count: int) -> Any:
    """Routine, keyword arguments and positions of a step; None where it needs more than these."""
    action = step.action
    positions = action.positions
    if action.autodiff or len(action.kwargs) > _MANY // 2:
        return None
    if positions is not None and not all(0 <= position < count for position in positions):
        return None
    return action.routine, dict(action.kwargs), positions, step
