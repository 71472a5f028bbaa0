"""The six kinds of action that an analysis routine can request, and the record of one request.

Runs nothing. The points at which actions run, and their order, are those of the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from amanda_core.interface.driver import POINTS, IPoint

if TYPE_CHECKING:
    from amanda_core.engine.tool import Tool

__all__ = [
    "POINTS",
    "Action",
    "ActionKind",
    "IPoint",
    "Positions",
    "Routine",
    "is_staged",
    "staged",
]

#: An instrumentation routine. It gets the selected values and the keyword arguments of its action.
Routine = Callable[..., Any]
#: Which values a routine gets, by position; None for all.
Positions = Sequence[int] | None


class ActionKind(Enum):
    """The six kinds of action (paper, listing 3), named like the methods that request them.

    Attributes:
        point: The point whose plan the action joins. A replacement joins that of the point before
            the op.
        selects: Name of the values that the routine gets.
        is_replacement: Whether the routine runs instead of the op.
        on_backward: Whether the action is one on the backward program.
    """

    INSERT_BEFORE_OP = "insert_before_op", IPoint.BEFORE_FORWARD, "inputs"
    INSERT_AFTER_OP = "insert_after_op", IPoint.AFTER_FORWARD, "outputs"
    INSERT_BEFORE_BACKWARD_OP = "insert_before_backward_op", IPoint.BEFORE_BACKWARD, "grad_outputs"
    INSERT_AFTER_BACKWARD_OP = "insert_after_backward_op", IPoint.AFTER_BACKWARD, "grad_inputs"
    REPLACE_OP = "replace_op", IPoint.BEFORE_FORWARD, "inputs"
    REPLACE_BACKWARD_OP = "replace_backward_op", IPoint.BEFORE_BACKWARD, "grad_outputs"

    point: IPoint
    selects: str
    is_replacement: bool
    on_backward: bool

    __hash__ = object.__hash__

    def __new__(cls, value: str, point: IPoint, selects: str) -> ActionKind:  # noqa: D102
        kind = object.__new__(cls)
        kind._value_, kind.point, kind.selects = value, point, selects
        kind.is_replacement, kind.on_backward = value.startswith("replace"), point.is_backward
        return kind


_STAGED = "__amanda_staged__"


def staged(routine: Routine) -> Routine:
    """Mark an instrumentation routine as pure framework code that may be embedded into a graph.

    A staged routine uses only operations of the framework and has no Python side effects, and its
    keyword arguments do not change within an epoch. Eager drivers call it like any other.

    >>> @staged
    ... def halve(weight):
    ...     return weight * 0.5
    """
    setattr(routine, _STAGED, True)
    return routine


def is_staged(routine: Routine) -> bool:
    """Return True if a routine is marked with `staged`."""
    return bool(getattr(routine, _STAGED, False))


# Not frozen: it is made for each op, and a frozen one takes ten times as long to make.
@dataclass(slots=True, eq=False)
class Action:
    """One request of an analysis routine, which nothing changes.

    Attributes:
        kind: Which of the six kinds.
        routine: The instrumentation routine.
        positions: Positions that the routine gets, in this order; None means all.
        kwargs: Keyword arguments, which each execution passes to the routine without a copy.
        tool: The tool whose analysis requested it.
        autodiff: Whether the routine's own operations are differentiated.
        observe: Whether the routine only observes. It must return None, and the program must not be
            changed for it.
    """

    kind: ActionKind
    routine: Routine
    positions: tuple[int, ...] | None
    kwargs: Mapping[str, Any]
    tool: Tool
    autodiff: bool
    observe: bool = False

    @property
    def staged(self) -> bool:
        """True if the routine is marked with `staged`."""
        return is_staged(self.routine)

    @property
    def routine_name(self) -> str:
        """Qualified name of the routine, for messages."""
        return str(getattr(self.routine, "__qualname__", None) or repr(self.routine))
