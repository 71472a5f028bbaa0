"""A tool that records which ops ran, by id, for tests of ids and of contexts."""

from __future__ import annotations

from typing import Any

import amanda
from amanda_core import OpContext


class Trace(amanda.Tool):
    """Records what was analysed, and every execution, by id.

    Attributes:
        names: Id -> readable name, for forward ops.
        types: Id -> op type.
        analysed: Ids in order of analysis.
        calls: Ids in order of execution.
    """

    def __init__(self, *types: str) -> None:
        super().__init__()
        self.chosen = types
        self.names: dict[int, str] = {}
        self.types: dict[int, str] = {}
        self.analysed: list[int] = []
        self.calls: list[int] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if self.chosen and context.op_type not in self.chosen:
            return
        number = context.get_op_id()
        self.names[number], self.types[number] = context.name, context.op_type
        self.analysed.append(number)
        context.insert_before_op(self.count, number=number)

    def count(self, *values: Any, number: int) -> None:
        self.calls.append(number)

    def take(self) -> list[int]:
        """Return the calls since the last call of this method."""
        calls, self.calls = self.calls, []
        return calls


def contexts_of(handle: amanda.Handle) -> int:
    assert handle.session is not None
    return sum(1 for _ in handle.session.contexts())
