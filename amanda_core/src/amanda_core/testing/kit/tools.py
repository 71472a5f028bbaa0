"""Tools with one action on some ops, for the tests of drivers.

An op is named by its type, its name, or the last part of its name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import amanda
from amanda_core import OpContext, Tool

__all__ = [
    "Edit",
    "Everywhere",
    "Positions",
    "Routine",
    "after",
    "analysed",
    "around",
    "at_inputs",
    "at_outputs",
    "before",
    "editing",
    "idle",
    "replacing",
    "replacing_backward",
    "tool",
    "watching",
    "watching_backward",
]

Routine = Callable[..., Any]
#: Positions of inputs, outputs or gradients; one of them; None for all.
Positions = Sequence[int] | int | None


class Edit(NamedTuple):
    """One request of a tool.

    Attributes:
        name: The op: its type, or the last part of its name.
        kind: ``before``, ``after``, ``replace``, ``grad_out``, ``grad_in`` or ``backward``.
        routine: The routine that is inserted.
        position: The one input, output or gradient that it gets; None for all.
        autodiff: Whether it is differentiated.
    """

    name: str
    kind: str
    routine: Routine
    position: int | None = None
    autodiff: bool = False


_NUMBER = re.compile(r"_\d+$")
_METHODS = {
    "before": ("insert_before_op", "inputs"),
    "after": ("insert_after_op", "outputs"),
    "replace": ("replace_op", "inputs"),
    "grad_out": ("insert_before_backward_op", "grad_outputs"),
    "grad_in": ("insert_after_backward_op", "grad_inputs"),
    "backward": ("replace_backward_op", "grad_outputs"),
}


def is_named(context: OpContext, name: str | None) -> bool:
    """Return True if `name` matches an op; None matches every op."""
    last = context.name.rpartition("/")[2]
    if context.recomputed:
        last = _NUMBER.sub("", last)  # In the same graph its name has a number at the end.
    return name in (None, context.op_type, context.name, last)


def tool(
    analyse: Callable[[OpContext], Any],
    op: str | None = None,
    *,
    backward: bool = False,
    require_outputs: bool = False,
) -> Tool:
    """Return a tool with one analysis routine, for one (backward) op or for all."""

    def chosen(context: OpContext) -> None:
        if is_named(context, op):
            analyse(context)

    made = Tool()
    made.add_inst_for_op(chosen, backward, require_outputs)
    return made


def editing(*edits: Edit) -> Tool:
    """Return a tool that applies the edits to all forward ops that they name."""

    def analyse(context: OpContext) -> None:
        for edit in edits:
            if not is_named(context, edit.name):
                continue
            positions = None if edit.position is None else [edit.position]
            switch = amanda.autodiff_enabled if edit.autodiff else amanda.autodiff_disabled
            with switch():
                _ask(context, edit.kind, edit.routine, positions)

    return tool(analyse)


class Everywhere(Tool):
    """Inserts a routine at every point of every op.

    The points are those of forward ops, of the gradients aligned with them, and of raw backward
    ops. A subclass leaves some out in `forward` and `backward`, the analysis routines.

    Args:
        routine: The routine.
        aligned: Whether to insert at the gradients of forward ops, too.
    """

    def __init__(self, routine: Routine, aligned: bool = True) -> None:
        super().__init__()
        self.routine, self.aligned = routine, aligned
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: OpContext) -> None:
        """Insert at the points of a forward op."""
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)
        if self.aligned:
            self._at_gradients(context)

    def backward(self, context: OpContext) -> None:
        """Insert at the points of a backward op."""
        self._at_gradients(context)

    def _at_gradients(self, context: OpContext) -> None:
        context.insert_before_backward_op(self.routine)
        context.insert_after_backward_op(self.routine)


def before(op: str, routine: Routine, inputs: Positions = None) -> Tool:
    """Return a tool that inserts `routine` before every op of a name."""
    return _asking(op, "before", routine, inputs)


def after(op: str, routine: Routine, outputs: Positions = None) -> Tool:
    """Return a tool that inserts `routine` after every op of a name."""
    return _asking(op, "after", routine, outputs)


def replacing(op: str, routine: Routine, inputs: Positions = None) -> Tool:
    """Return a tool that replaces every op of a name."""
    return _asking(op, "replace", routine, inputs)


def replacing_backward(op: str, routine: Routine) -> Tool:
    """Return a tool that replaces the whole backward of every op of a name (aligned)."""
    return _asking(op, "backward", routine, None)


def at_outputs(
    op: str, routine: Routine, grad_outputs: Positions = None, *, late: bool = False
) -> Tool:
    """Return a tool that requests aligned gradients of outputs, before or after the op."""
    return _asking(op, "grad_out", routine, grad_outputs, late)


def at_inputs(
    op: str, routine: Routine, grad_inputs: Positions = None, *, late: bool = False
) -> Tool:
    """Return a tool that requests aligned gradients of inputs, before or after the op."""
    return _asking(op, "grad_in", routine, grad_inputs, late)


def _asking(op: str, kind: str, routine: Routine, positions: Positions, late: bool = False) -> Tool:
    chosen = [positions] if isinstance(positions, int) else positions
    return tool(lambda context: _ask(context, kind, routine, chosen), op, require_outputs=late)


def _ask(context: OpContext, kind: str, routine: Routine, positions: Sequence[int] | None) -> None:
    method, selects = _METHODS[kind]
    getattr(context, method)(routine, **{selects: positions})


def watching() -> tuple[list[str], Tool]:
    """Return a list for the types of the forward ops that run, and the tool that fills it."""
    seen: list[str] = []

    def analyse(context: OpContext) -> None:
        op_type = context.op_type
        context.insert_before_op(lambda *values: seen.append(op_type))

    return seen, tool(analyse)


def around() -> tuple[Counter[tuple[str, str]], Tool]:
    """Return a count of the routines before and after the forward ops of each type, and the tool.

    Keys are (type, "before") and (type, "after").
    """
    seen: Counter[tuple[str, str]] = Counter()

    def analyse(context: OpContext) -> None:
        op_type = context.op_type
        context.insert_before_op(lambda *values: seen.update([(op_type, "before")]))
        context.insert_after_op(lambda *values: seen.update([(op_type, "after")]))

    return seen, tool(analyse)


def watching_backward() -> tuple[list[tuple[str, str | None]], Tool]:
    """Return a list of the backward ops that run, with their forward ops' types, and its tool."""
    seen: list[tuple[str, str | None]] = []

    def analyse(context: OpContext) -> None:
        forward = context.forward.op_type if context.forward is not None else None
        pair = (context.op_type, forward)
        context.insert_before_backward_op(lambda *grads: seen.append(pair))

    return seen, tool(analyse, backward=True)


def analysed(backward: bool = False) -> tuple[list[OpContext], Tool]:
    """Return a list for the contexts that are analysed, and the tool that fills it."""
    contexts: list[OpContext] = []
    return contexts, tool(contexts.append, backward=backward)


def idle() -> Tool:
    """Return a tool that analyses at all four points and inserts nothing."""
    made = Tool()
    for backward in (False, True):
        for require_outputs in (False, True):
            made.add_inst_for_op(lambda context: None, backward, require_outputs)
    return made
