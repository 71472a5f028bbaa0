"""The errors about positions that an op does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amanda_core.errors import PositionError

if TYPE_CHECKING:
    from amanda_core.action import ActionKind, Positions
    from amanda_core.context import OpContext

__all__ = ["COUNTED", "refusal"]

COUNTED = "Positions are those of the op's signature, counted from 0"


def refusal(
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
