"""The attachment of one session to tinytape, whose operators all pass `tinytape.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tinytape
from amanda_core.driver_kit import Routes, Session
from amanda_core.interface import CoverageGap
from amanda_driver_tinytape.execution import Execution
from amanda_driver_tinytape.facts import TapeFacts
from amanda_driver_tinytape.identity import OpTable
from amanda_driver_tinytape.vocabulary import DECLARATIONS
from tinytape import Operator, Tensor

__all__ = ["TapeAttachment"]


class _Interception(Routes):
    """Replaces tinytape's functions while tools are applied. Other threads run without tools."""

    def install(self) -> None:
        # Operators look `run` up in their module, even if a program imported them by name.
        self.route(tinytape, "run", TapeAttachment.run)
        self.route(tinytape, "sgd", TapeAttachment.sgd)


_INTERCEPTION = _Interception()


class TapeAttachment:
    """Instruments the operators of the thread that made it."""

    #: Answers the questions of tools about tensors.
    facts = TapeFacts()

    def __init__(self, session: Session) -> None:
        self.session = session
        self._is_recording = tinytape.is_recording()
        self.ops = session.persistent("tinytape.ops", OpTable)
        session.at_close(self.detach)  # First, so that it is detached whatever interrupts it.
        _INTERCEPTION.attach(self)

    def detach(self) -> None:
        """Restore the functions that were found, once the last session ends."""
        # An exception may arrive in `no_grad` before that restores it.
        tinytape.set_recording(self._is_recording)
        _INTERCEPTION.detach(self)

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what this driver does not instrument."""
        return DECLARATIONS.gaps()

    def run(
        self, original: Callable[..., Tensor], operator: Operator, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Execute an operator, in place of `tinytape.run`."""
        session = self.session
        # `enabled` is False inside routines and under amanda.disabled().
        if not session.enabled:
            return original(operator, inputs)
        record = self.ops.locate(operator, inputs)
        if record.is_idle(session) and not session.wants_backward:
            return original(operator, inputs)
        (output,) = Execution(session, record, operator, original).run(inputs)
        assert isinstance(output, Tensor)
        return output

    def sgd(self, original: Callable[..., None], *args: Any) -> None:
        """Update parameters, which ends a step."""
        original(*args)
        self.session.end_step()
