"""Capabilities that an action requires of the driver, such as gradients or replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amanda_core.action import ActionKind, IPoint
from amanda_core.errors import LateActionError, UnsupportedError

if TYPE_CHECKING:
    from amanda_core.context import OpContext

__all__ = ["require"]


def require(
    context: OpContext, kind: ActionKind, point: IPoint, autodiff: bool, where: str
) -> None:
    """Refuse an action that the driver does not support where the op of `context` runs.

    Args:
        context: The op's context.
        kind: Kind of the action.
        point: Point of the analysis that requests it.
        autodiff: Whether the routine is to be differentiated.
        where: Tool, routine and op, for messages.

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
                where=where,
                fix="Request it only if context.supports() returns True",
            )
    # A backward context comes after its driver knew that its op would be watched.
    late = backward and point is IPoint.AFTER_FORWARD
    if late and not context.supports("late_gradients"):
        raise LateActionError(
            f"{kind.value} at {point.value} comes too late: the driver {framework!r} has no "
            f"'late_gradients' in mode {mode!r}, so it must know before an op runs whether "
            "its gradients are watched",
            where=where,
            fix="Register the routine with require_outputs=False",
        )
