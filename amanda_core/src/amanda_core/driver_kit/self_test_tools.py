"""Parts of the self-tests of drivers: tools that look and edit, and the end of a test.

A self-test runs in a process of its own. It exits with 0 if everything is right; otherwise the last
line of its standard error says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from amanda_core.engine.activation import attach
from amanda_core.engine.context import OpContext
from amanda_core.engine.tool import Tool

__all__ = ["Watching", "applied", "doubling", "require", "require_seen"]

R = TypeVar("R")


class Watching(Tool):
    """Notes every operator, forward and backward, and looks at each value.

    Attributes:
        forward: What was noted of operators.
        backward: What was noted of backward operators.
        values: How often it looked at values.

    Args:
        name: Returns what to note of a context; its type by default.
        observe: Whether its routines observe. Otherwise they could edit, and return None.

    >>> Watching().forward
    []
    """

    def __init__(
        self, name: Callable[[OpContext], Any] = attrgetter("op_type"), observe: bool = True
    ) -> None:
        super().__init__()
        self.forward, self.backward, self.values = list[str](), list[str](), 0
        self._name, self._observe = name, observe
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_backward, backward=True)

    def _analyse(self, context: OpContext) -> None:
        self.forward.append(str(self._name(context)))
        context.insert_before_op(self._look, observe=self._observe)
        context.insert_after_op(self._look, observe=self._observe)

    def _analyse_backward(self, context: OpContext) -> None:
        self.backward.append(str(self._name(context)))
        context.insert_after_backward_op(self._look, observe=self._observe)

    def _look(self, *values: Any) -> None:
        self.values += 1


def doubling(
    op_type: str, inputs: Sequence[int] | None = None, require_outputs: bool = False
) -> Tool:
    """Return a tool that doubles what operators of a type return, or some of their inputs.

    Args:
        op_type: The framework's type of the operators.
        inputs: Positions of the inputs; None for the outputs.
        require_outputs: Whether it is inserted when the operators have run.
    """
    tool = Tool()

    def analyse(context: OpContext) -> None:
        if context.op_type != op_type:
            return
        if inputs is None:
            context.insert_after_op(_double)
        else:
            context.insert_before_op(_double, inputs=inputs)

    tool.add_inst_for_op(analyse, require_outputs=require_outputs)
    return tool


def _double(value: Any) -> Any:
    return value * 2


def applied(tool: Tool, program: Callable[[], R]) -> R:
    """Return what a program returns while a tool is applied."""
    handle = attach(tool)
    try:
        return program()
    finally:
        handle.remove()


def require(condition: object, what: str) -> None:
    """End the process unless a condition holds.

    Args:
        condition: The condition.
        what: What is wrong otherwise.
    """
    if not condition:
        raise SystemExit(f"The self-test failed: {what}")


def require_seen(wanted: set[str], seen: Sequence[str], what: str = "operators") -> None:
    """End the process unless all names were seen.

    Args:
        wanted: The names.
        seen: What was noted.
        what: What they name.
    """
    missing = sorted(wanted.difference(seen))
    require(not missing, f"{what} were not seen: {', '.join(missing)}")
