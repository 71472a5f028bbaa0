"""`Conflict`: a value that several tools have changed, and the order of the changes.

Owns the report. `plan` records in the context of an op which steps have changed a value. Two
replacements of one op are not reported here: they are an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_core.engine.session import Session

__all__ = ["Conflict", "conflicts"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """One value of one op that several tools changed.

    Attributes:
        op: Readable name of the op.
        op_id: Its id. A backward op has one of its own.
        kind: The method that requested the change, such as ``insert_before_op``.
        position: Position of the value among the inputs, outputs or gradients that `kind` selects.
        tools: The tools in the order in which they are called. Each gets the previous one's value.
        source: ``file:line`` of the op's call, or None.
    """

    op: str
    op_id: int
    kind: str
    position: int
    tools: tuple[str, ...]
    source: str | None

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        first, *others = self.tools
        return (
            f"{self.op}{where}: {self.kind} of {first}, then of {', then of '.join(others)}, "
            f"changed value {self.position}"
        )


def conflicts(session: Session) -> list[Conflict]:
    """Return the values that several of the applied tools have changed so far."""
    order = {tool._amanda.serial: tool.tool_name for tool in session.tools}
    found = []
    for context in session.contexts():
        for (kind, position), editors in context._edits.items():
            tools = tuple(name for serial, name in order.items() if serial in editors)
            if len(tools) > 1:
                found.append(
                    Conflict(
                        context.name,
                        context._id,
                        kind.value,
                        position,
                        tools,
                        context.source,
                    )
                )
    return found
