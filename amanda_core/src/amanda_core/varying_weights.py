"""A warning about tools that keep something by operator where the operator's weight varies.

Owns the check of one requested edit. It is loaded when a tool passes arguments to a routine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amanda_core.action import Action, ActionKind
from amanda_core.errors import VaryingWeightWarning
from amanda_core.warning_locations import warn

if TYPE_CHECKING:
    from amanda_core.context import OpContext
    from amanda_core.session import Session

__all__ = ["check_weights"]

_OF_INPUTS = frozenset(
    {ActionKind.INSERT_BEFORE_OP, ActionKind.REPLACE_OP, ActionKind.INSERT_AFTER_BACKWARD_OP}
)


def check_weights(context: OpContext, action: Action, session: Session) -> None:
    """Warn if an edit always gets one tensor, such as a mask, for a weight that varies.

    Args:
        context: The op's context, during the analysis that requested the edit.
        action: The edit.
        session: The session. Each message is given once.
    """
    facts, positions = context.facts, action.positions
    if action.observe or action.kind not in _OF_INPUTS or facts is None:
        return
    if not any(facts.is_tensor(value) for value in action.kwargs.values()):
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
