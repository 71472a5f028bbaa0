"""One execution of an op: pending analysis, edits before it, the op itself, edits after it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tinytape
from amanda_core.driver_kit import (
    ForwardProgram,
    OpContext,
    OpRecord,
    Session,
    Step,
    backward_plans,
    several,
)
from amanda_core.interface import UnsupportedError
from amanda_driver_tinytape.gradients import watch
from amanda_driver_tinytape.identity import constant
from tinytape import Node, Operator, Tensor

__all__ = ["Execution"]


class Execution(ForwardProgram):
    """One execution of an op.

    Args:
        session: The session.
        record: What the op is.
        operator: tinytape's operator.
        original: Runs an operator as tinytape does.
    """

    def __init__(
        self,
        session: Session,
        record: OpRecord,
        operator: Operator,
        original: Callable[..., Tensor],
    ) -> None:
        super().__init__(session, record, operator, input_names=operator.inputs, constant=constant)
        self._original = original

    def unrecorded(self) -> AbstractContextManager[object]:
        """Return a context manager in which nothing is recorded on the tape."""
        return tinytape.no_grad()

    def edited(self, old: Any, new: Any) -> Any:
        """Return the new value with the old source, to which its gradient goes straight."""
        return Tensor(new.data, old.source)

    def compute(self, context: OpContext, replacement: Step | None, values: list[Any]) -> list[Any]:
        """Return the output of the op, or of its replacement, which is differentiated as written.

        The gradients of the op are watched once the analysis after it has run, in `leaving`.
        """
        self._context, self._is_replaced = context, replacement is not None
        if replacement is not None:
            return several(replacement.replace(values))
        return [self._original(self.raw, values)]

    def leaving(self, outputs: list[Any]) -> list[Any]:
        """Watch the op's backward program if a tool needs it."""
        context, source = self._context, outputs[0].source
        acts = any(backward_plans(context))
        if self._is_replaced and acts:
            raise UnsupportedError(
                "A replaced op has no backward op of its own that a tool could instrument",
                where=context.where,
                fix="Do this in the routine that replaces the op, or do not replace the op",
            )
        is_watched = acts or self.session.wants_backward
        if is_watched and isinstance(source, Node) and not self._is_replaced:
            watch(self.session, context, source)
        return outputs
