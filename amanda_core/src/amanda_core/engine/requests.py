"""Requirements of the requests of analysis routines, with the errors and warnings of each.

Owns the checks that few requests need: capabilities of the driver, positions that an op does not
have, requests that come too late, values of many processes, and arguments that belong to one weight
of several. `OpContext` records requests and calls these where a first look finds that they are
needed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from amanda_core.engine.action import Action, ActionKind, IPoint, Positions, Routine, is_staged
from amanda_core.errors import (
    ActionError,
    AmandaError,
    LateActionError,
    PositionError,
    UnsupportedError,
    VaryingWeightWarning,
)
from amanda_core.runtime.warning_locations import warn

if TYPE_CHECKING:
    from amanda_core.engine.context import OpContext
    from amanda_core.engine.session import Session

__all__ = [
    "COUNTED",
    "OF_INPUTS",
    "POSITION_NAMES",
    "bad_positions",
    "check_weights",
    "of_logical_values",
    "refusal",
    "refuse_misspelt",
    "require",
]

COUNTED = "Positions are those of the op's signature, counted from 0"
#: Kinds of action whose positions are those of inputs.
OF_INPUTS = frozenset(
    {ActionKind.INSERT_BEFORE_OP, ActionKind.REPLACE_OP, ActionKind.INSERT_AFTER_BACKWARD_OP}
)

#: What positions are called by the methods that request actions, or by mistake.
POSITION_NAMES = frozenset(
    [
        *("input", "inputs", "output", "outputs", "position", "positions", "grad_in", "grad_out"),
        *("grad_input", "grad_inputs", "grad_output", "grad_outputs"),
    ]
)


def refusal(context: OpContext, kind: ActionKind, func: object) -> AmandaError:
    """Return the error about a request that `context` refuses."""
    if context._recorder is None:
        return LateActionError(
            f"{kind.value} was called outside an analysis routine",
            where=context.where,
            fix="Request actions in a routine registered with add_inst_for_op",
        )
    _, point, _ = context._recorder
    where = context._requested()
    if not callable(func):
        return ActionError(f"{func!r} cannot be called", where=where, fix="Pass a function")
    if context.is_backward() and not kind.on_backward:
        return LateActionError(
            f"{kind.value} on a backward context comes too late: the forward op has run",
            where=where,
            fix="Request it in a forward analysis routine",
        )
    return LateActionError(
        f"{kind.value} at {point.value} comes too late",
        where=where,
        fix="Register the routine with require_outputs=False",
    )


def refuse_misspelt(
    context: OpContext, kind: ActionKind, func: object, given: Mapping[str, Any]
) -> None:
    """Refuse keyword arguments that a routine lacks and that look like `inputs=` or `grad_inputs=`.

    Raises:
        ActionError: `given` has such a name, for example ``input``, and `func` does not take it.
    """
    code = getattr(getattr(func, "__func__", func), "__code__", None)
    # Most routines name them; a signature takes longer than all else at a request.
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    names = [name for name in given if name in POSITION_NAMES and name not in parameters]
    if not names:
        return
    try:
        taken = inspect.signature(cast("Any", func)).parameters
    except (TypeError, ValueError):  # It is written in C.
        return
    takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    wrong = [] if takes_all else [name for name in names if name not in taken]
    if wrong:
        raise ActionError(
            f"{kind.value} passes {wrong[0]}= on to the routine, which has no such parameter",
            where=context.where,
            fix=f"Did you mean {kind.selects}=? That selects the values which the routine gets",
        )


def require(context: OpContext, kind: ActionKind, point: IPoint, autodiff: bool) -> None:
    """Refuse an action that the driver does not support where the op of `context` runs.

    Args:
        context: The op's context.
        kind: Kind of the action.
        point: Point of the analysis that requests it.
        autodiff: Whether the routine is to be differentiated.

    Raises:
        UnsupportedError: The driver lacks a capability.
        LateActionError: The driver would have to know of it before the op runs.
    """
    framework, *_, mode = context.namespace.split("/")
    of_backward_op, backward = context.is_backward(), kind.point.is_backward
    for capability, is_needed in (
        ("gradients", backward and of_backward_op),
        ("aligned_gradients", backward and not of_backward_op),
        ("replace", kind is ActionKind.REPLACE_OP),
        ("replace_backward", kind is ActionKind.REPLACE_BACKWARD_OP),
        ("autodiff", autodiff and not kind.is_replacement),
    ):
        if is_needed and not context.supports(capability):
            raise UnsupportedError(
                f"The driver {framework!r} has no {capability!r} in mode {mode!r}, which "
                f"{kind.value} needs",
                where=context._requested(),
                fix="Request it only if context.supports() returns True",
            )
    # A backward context comes after its driver knew that its op would be watched.
    late = backward and point is IPoint.AFTER_FORWARD
    if late and not context.supports("late_gradients"):
        raise LateActionError(
            f"{kind.value} at {point.value} comes too late: the driver {framework!r} has no "
            f"'late_gradients' in mode {mode!r}, so it must know before an op runs whether "
            "its gradients are watched",
            where=context._requested(),
            fix="Register the routine with require_outputs=False",
        )


def of_logical_values(
    context: OpContext, kind: ActionKind, func: Routine, observe: bool
) -> Routine:
    """Return a routine that gathers values of many processes, and calls `func` with them.

    Args:
        context: The op's context.
        kind: Kind of the action.
        func: The routine of the tool, which gets each such value as a whole.
        observe: Whether it only observes.

    Raises:
        ActionError: It edits values, or is staged. Processes cannot meet within a graph.
    """
    if not observe or is_staged(func):
        raise ActionError(
            f"{kind.value} with logical=True takes a routine on the host that changes nothing",
            where=context._requested(),
            fix="Add observe=True and return nothing. An edit gets the part of this process, and "
            "may look at context.facts.whole(value)",
        )
    if (facts := context.facts) is None:
        return func

    def whole(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [whole(one) for one in value]
        return facts.whole(value) if facts.is_tensor(value) else value

    @functools.wraps(func)
    def routine(*values: Any, **kwargs: Any) -> Any:
        return func(*map(whole, values), **kwargs)

    return routine


def bad_positions(
    context: OpContext,
    kind: ActionKind,
    given: Positions,
    chosen: Sequence[Any],
    count: int | None,
    where: str,
) -> PositionError:
    """Return the error for the positions of an action.

    Args:
        context: The op's.
        kind: The action.
        given: What was given; an iterator is used up.
        chosen: The positions in it.
        count: The number of values; None if it is not known yet.
        where: Tool, routine and op.
    """
    if not all(type(position) is int for position in chosen):
        wrong = f"{kind.selects}={given!r} is not a list of positions"
        fix = f"Write {kind.selects}=[0] for the first"
    elif len(set(chosen)) < len(chosen):
        wrong = f"{kind.selects}={list(chosen)} names a position twice"
        fix = "Name each position once"
    else:
        missing = next(p for p in chosen if p < 0 or (count is not None and p >= count))
        names = context.input_names
        gradients = kind.selects == "grad_inputs" and not context.is_backward()
        inputs = kind.selects == "inputs" or gradients
        listed = ", ".join(names) if inputs and names else "numbered from 0"
        known = "" if count is None else f": it has {count} ({listed})"
        wrong, fix = f"The op has no {kind.selects}[{missing}]{known}", COUNTED
    return PositionError(wrong, where=where, fix=fix)


def check_weights(context: OpContext, action: Action, session: Session) -> None:
    """Warn if an edit always gets one tensor, such as a mask, for a weight that varies.

    Args:
        context: The op's context, during the analysis that requested the edit.
        action: The edit.
        session: The session. Each message is given once.
    """
    facts, positions = context.facts, action.positions
    if facts is None or not any(facts.is_tensor(value) for value in action.kwargs.values()):
        return
    warned: set[str] = session.persistent("core.varying_weights", set)
    for place, weight in context.weights.items():
        position = place if isinstance(place, int) else place[0]
        if not weight.varies or (positions is not None and position not in positions):
            continue
        message = (
            f"Tool {action.tool.tool_name} passes one tensor to {action.routine_name} for all "
            f"executions of {context.op_type}, which reads other parts of {weight.name} at other "
            "times. Keep the tensor by weight: use amanda.WeightState, and look up "
            "context.weights in the routine"
        )
        if message not in warned:
            warned.add(message)
            warn(message, category=VaryingWeightWarning)
