"""Gradients of ops: gates on MXNet's tape, between which an op's backward program runs.

MXNet shows no backward op, so the one between the two gates of an op is its whole backward program.
Gates run on worker threads of MXNet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core import OpContext, Session, Step
from amanda_core.execution import BackwardProgram, Run, at, backward_plans, several
from amanda_driver_mxnet._mxnet_internals.arrays import BACKWARD, needs_gradient
from amanda_driver_mxnet.custom_nodes import Node, passed
from amanda_driver_mxnet.facts import FACTS

__all__ = ["Watch"]

#: Backward ops of one op may run at the same time, and share a context.
_LOCK = threading.RLock()


class Watch:
    """The plans of the gradients of one op.

    Args:
        session: Returns the session that runs now.
        context: That of the op.
        places: Positions of the inputs with a gradient.
        count: How many inputs there are.
    """

    def __init__(
        self, session: Callable[[], Session], context: OpContext, places: Sequence[int], count: int
    ) -> None:
        self._session, self._context, self._count = session, context, count
        self.places = places
        self._program: BackwardProgram | None = None
        self._replaced: list[Any] = []

    # On the tape of imperative programs.

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """Return the inputs after a gate, which gets the op's contributions to their gradients."""
        return self._gated(values, self.places, self.leave)

    def exit(self, outputs: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Return the outputs after a gate, which gets their gradients first.

        Args:
            outputs: The outputs.
            sources: The inputs after their gate.
        """
        if self.replacement is not None:
            new = [value.detach() for value in outputs]
            return passed(self.replacing(new), [*new, *(sources[place] for place in self.places)])
        places = [place for place, value in enumerate(outputs) if needs_gradient(value)]
        return self._gated(outputs, places, self.arrive)

    def _gated(self, values: Sequence[Any], places: Sequence[int], run: Run) -> list[Any]:
        new = list(values)
        backward = at(places, len(values), run)
        node = Node(self._session, len(places), list, backward)
        for place, value in zip(places, passed(node, [values[n] for n in places]), strict=True):
            new[place] = value
        return new

    # On MXNet's threads.

    @property
    def replacement(self) -> Step | None:
        """The step that runs instead of the op's backward program, or None."""
        return backward_plans(self._context)[0].replacement

    def replacing(self, outputs: Sequence[Any]) -> Node:
        """Return the node that replaces the backward program.

        It passes the outputs, which it gets before the inputs at `places`, and sends gradients to
        the latter.
        """
        count = len(outputs)

        def first(values: Sequence[Any]) -> list[Any]:
            return list(values[:count])

        def backward(gradients: list[Any]) -> list[Any]:
            return [None] * count + self._replacing_gradients(gradients)

        types = [FACTS.dtype(output) for output in outputs]
        return Node(self._session, count + len(self.places), first, backward, types, first)

    def _replacing_gradients(self, gradients: list[Any]) -> list[Any]:
        program = self._begun()
        arriving = program.enter(gradients)
        assert program.replacement is not None
        found = several(program.replacement.replace(arriving))
        if len(found) == 1 == len(self.places):
            return found
        found += [None] * (self._count - len(found))
        return [found[place] for place in self.places]

    def arrive(self, gradients: list[Any]) -> list[Any]:
        """Execute the plans before the op's backward program on the gradients of its outputs."""
        with _LOCK:
            program = self._program = self._begun()
            if not program.is_active:
                return gradients
            arriving = program.enter(gradients)
            if program.replacement is not None:
                # The original runs as well; nothing can keep it from running.
                self._replaced = several(program.replacement.replace(arriving))
            return arriving

    def leave(self, contributions: list[Any]) -> list[Any]:
        """Execute the plans after the backward program on the gradients of the inputs."""
        with _LOCK:
            program, self._program = self._program or self._begun(), None
            replaced, self._replaced = self._replaced, []
            if not program.is_active:
                return contributions
            return program.leave([*replaced, *contributions[len(replaced) :]])

    def _begun(self) -> BackwardProgram:
        name = f"{BACKWARD}{self._context.op_type}"
        return BackwardProgram(self._session(), self._context, name)
