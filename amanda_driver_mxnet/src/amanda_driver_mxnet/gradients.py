"""Gradients of ops: gates on MXNet's tape, between which an op's backward program runs.

MXNet shows no backward op, so the one between the two gates of an op is its whole backward program.
Gates run on worker threads of MXNet, so exceptions are deferred.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import (
    BackwardProgram,
    OpContext,
    Run,
    Session,
    Step,
    at,
    backward_plans,
    deferring,
    several,
)
from amanda_driver_mxnet.mxnet_internals.arrays import BACKWARD, needs_gradient, record

__all__ = ["Watch"]

#: Backward ops of one op may run at the same time, and share a context.
_LOCK = threading.RLock()


class Watch:
    """The plans of the gradients of one execution of an op.

    Args:
        session: The session.
        context: That of the op.
        places: Positions of the inputs with a gradient.
        count: How many inputs there are.
    """

    def __init__(
        self, session: Session, context: OpContext, places: Sequence[int], count: int
    ) -> None:
        self._session, self._context, self._count = session, context, count
        self._places = places
        self._program: BackwardProgram | None = None
        #: The inputs after their gate.
        self._inputs: list[Any] = []
        self._replaced: list[Any] = []

    # On the tape.

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """Return aliases of the inputs; a tape entry gets the op's part of their gradients."""
        self._inputs = self._gated(values, self._places, self._leave)
        return self._inputs

    def exit(self, outputs: Sequence[Any]) -> list[Any]:
        """Return aliases of the outputs; a tape entry gets their gradients first."""
        if backward_plans(self._context)[0].replacement is not None:
            new = [value.detach() for value in outputs]
            inputs = [self._inputs[place] for place in self._places]
            record(inputs, new, self._deferring(self._replacing_gradients, len(inputs)))
            return new
        places = [place for place, value in enumerate(outputs) if needs_gradient(value)]
        return self._gated(outputs, places, self._arrive)

    def _gated(self, values: Sequence[Any], places: Sequence[int], run: Run) -> list[Any]:
        new = list(values)
        for place in places:
            new[place] = values[place].detach()
        if places:
            backward = self._deferring(at(places, len(values), run), len(places))
            record([values[place] for place in places], [new[place] for place in places], backward)
        return new

    # On MXNet's threads.

    def _deferring(self, run: Run, count: int) -> Run:
        """Return a function for MXNet's threads; if `run` fails, gradients are as they were."""
        guarded = deferring(self._session, run)

        def computed(gradients: list[Any]) -> Sequence[Any]:
            found = guarded(gradients)
            if found is not None:
                return found
            return gradients if len(gradients) == count else [None] * count

        return computed

    def _replacing_gradients(self, gradients: list[Any]) -> list[Any]:
        program = self._begun()
        found = self._replacement_of(program, program.enter(gradients))
        if len(found) == 1 == len(self._places):
            return found
        found += [None] * (self._count - len(found))
        return [found[place] for place in self._places]

    def _arrive(self, gradients: list[Any]) -> list[Any]:
        """Execute the plans before the op's backward program on the gradients of its outputs."""
        with _LOCK:
            program = self._program = self._begun()
            if not program.is_active:
                return gradients
            arriving = program.enter(gradients)
            if program.replacement is not None:
                # The original runs as well; nothing can keep it from running.
                self._replaced = self._replacement_of(program, arriving)
            return arriving

    def _leave(self, contributions: list[Any]) -> list[Any]:
        """Execute the plans after the backward program on the gradients of the inputs."""
        with _LOCK:
            program, self._program = self._program or self._begun(), None
            replaced, self._replaced = self._replaced, []
            if not program.is_active:
                return contributions
            return program.leave([*replaced, *contributions[len(replaced) :]])

    def _replacement_of(self, program: BackwardProgram, gradients: list[Any]) -> list[Any]:
        replacement: Step | None = program.replacement
        assert replacement is not None
        return several(replacement.replace(gradients))

    def _begun(self) -> BackwardProgram:
        return BackwardProgram(self._session, self._context, f"{BACKWARD}{self._context.op_type}")
