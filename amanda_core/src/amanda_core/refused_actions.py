"""Errors about actions that come too late, or whose routine cannot be called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amanda_core.errors import ActionError, AmandaError, LateActionError

if TYPE_CHECKING:
    from amanda_core.action import ActionKind
    from amanda_core.context import OpContext

__all__ = ["refusal"]


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
