"""Gradients of ops: gates on MindSpore's tape, between which an op's backward program runs.

MindSpore shows no backward op, so the one between the two gates of an op is its whole backward
program. Operands in sequences have gradients in sequences, at the position of the operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspore import Tensor, ops

from amanda_core.driver_kit import (
    BackwardProgram,
    OpContext,
    Session,
    backward_plans,
    several,
    wants_gradients,
)
from amanda_core.interface import backward_type_of
from amanda_driver_mindspore.mindspore_internals.tape import gated, is_recording, needs_gradient

__all__ = ["Watch", "finish", "is_watched", "straight_through"]

#: The position of a tensor among values, and its index if the value is a sequence.
_Place = tuple[int, int | None]


def is_watched(session: Session, context: OpContext) -> bool:
    """Return True if a tool may want the gradients of an op that runs now."""
    return is_recording() and wants_gradients(session, context)


def straight_through(old: Any, new: Any) -> Any:
    """Return `new`, with its gradient passed to `old` as it is."""
    if not isinstance(new, Tensor):
        return new
    if not is_recording():
        return new
    if not needs_gradient(old):
        return ops.stop_gradient(new) if needs_gradient(new) else new
    dtype = old.dtype

    def passed(gradients: list[Any]) -> Sequence[Any]:
        return [
            one if one is None or one.dtype == dtype else one.astype(dtype) for one in gradients
        ]

    return gated([old], [new], passed)[0]


class Watch:
    """The plans of the gradients of one execution of an op.

    Args:
        session: The session.
        context: That of the op.
        written: Positions of values that the op changes in place, which get no gate.
        unfinished: The watches of this thread whose backward programs are running. MindSpore leaves
            out the gate before an op through which no gradient goes, such as `Sign`.
    """

    def __init__(
        self,
        session: Session,
        context: OpContext,
        written: Sequence[int],
        unfinished: list[Watch],
    ) -> None:
        self._session, self._context, self._written = session, context, written
        self._unfinished = unfinished
        #: The backward programs that are between their gates, innermost last.
        self._running: list[BackwardProgram] = []
        self._inputs: Sequence[Any] = ()

    def enter(self, values: Sequence[Any]) -> list[Any]:
        """Return the inputs after a gate, which gets the op's contributions to their gradients."""
        self._inputs = values
        kept = [place for place in _places(values) if place[0] not in self._written]
        return self._gated(values, kept, self._leave)

    def exit(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs after a gate, which gets their gradients first."""
        if backward_plans(self._context)[0].replacement is not None:
            return self._replaced(outputs)
        return self._gated(outputs, list(_places(outputs)), self._arrive)

    def _gated(self, values: Sequence[Any], places: Sequence[_Place], run: Any) -> list[Any]:
        if not places:
            return list(values)
        layout, tensors = _layout(values), [_at(values, place) for place in places]

        def backward(gradients: list[Any]) -> list[Any]:
            found = run(_filled(layout, places, gradients))
            return [_at(found, place) for place in places]

        return _put(values, places, gated(tensors, tensors, backward))

    def _replaced(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs after a gate that leads to the inputs, past the op's own program."""
        sources = list(_places(self._inputs))
        targets = [
            (place, index)
            for place, value in enumerate(outputs)
            for index in _indices(value)
            if _is_floating(_at(outputs, (place, index)))
        ]
        if not sources or not targets:
            return list(outputs)
        layout, count = _layout(outputs), len(self._inputs)

        def backward(gradients: list[Any]) -> list[Any]:
            program = self._begun()
            arriving = program.enter(_filled(layout, targets, gradients))
            assert program.replacement is not None
            found = several(program.replacement.replace(arriving))
            if len(found) == 1 == len(sources) and sources[0][1] is None:
                # A replacement may return the only gradient alone.
                found = [None] * sources[0][0] + found
            found = program.leave([*found, *[None] * (count - len(found))])
            return [_at(found, place) for place in sources]

        new = [ops.stop_gradient(_at(outputs, place)) for place in targets]
        old = [_at(self._inputs, place) for place in sources]
        return _put(outputs, targets, gated(old, new, backward))

    # In the backward program.

    def _arrive(self, gradients: list[Any]) -> list[Any]:
        """Execute the plans before the op's backward program on the gradients of its outputs."""
        finish(self._unfinished)
        program = self._begun()
        if not program.is_active:
            return gradients
        arriving = program.enter(gradients)
        self._running.append(program)
        self._unfinished.append(self)
        return arriving

    def _leave(self, contributions: list[Any]) -> list[Any]:
        """Execute the plans after the backward program on the gradients of the inputs."""
        finish([one for one in self._unfinished if one is not self])
        self._unfinished.clear()
        program = self._running.pop() if self._running else self._begun()
        return program.leave(contributions) if program.is_active else contributions

    def finish(self) -> None:
        """End a backward program that has no gradients for the inputs."""
        if self._running:
            program = self._running.pop()
            if program.is_active:
                program.leave([None] * len(self._inputs))

    def _begun(self) -> BackwardProgram:
        return BackwardProgram(
            self._session, self._context, backward_type_of(self._context.op_type)
        )


def finish(unfinished: list[Watch]) -> None:
    """End the backward programs that are behind their ops: the engine runs one op after another."""
    while unfinished:
        unfinished.pop().finish()


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _indices(value: Any) -> Sequence[int | None]:
    if isinstance(value, (tuple, list)):
        return [index for index, one in enumerate(value) if isinstance(one, Tensor)]
    return [None] if isinstance(value, Tensor) else []


def _places(values: Sequence[Any]) -> Iterator[_Place]:
    """Yield where the tensors with a gradient are, also those in sequences."""
    for place, value in enumerate(values):
        for index in _indices(value):
            if needs_gradient(_at(values, (place, index))):
                yield place, index


def _at(values: Sequence[Any], place: _Place) -> Any:
    value = values[place[0]]
    return value if place[1] is None or value is None else value[place[1]]


def _layout(values: Sequence[Any]) -> list[int | None]:
    """Return the lengths of the sequences among values, None for all others."""
    return [len(value) if isinstance(value, (tuple, list)) else None for value in values]


def _filled(
    layout: Sequence[int | None], places: Sequence[_Place], gradients: Sequence[Any]
) -> list[Any]:
    """Return gradients by position, with None for what has none."""
    indexed = {place for place, index in places if index is not None}
    new: list[Any] = [
        [None] * (length or 0) if place in indexed else None for place, length in enumerate(layout)
    ]
    for (place, index), gradient in zip(places, gradients, strict=True):
        if index is None:
            new[place] = gradient
        else:
            new[place][index] = gradient
    return new


def _put(values: Sequence[Any], places: Sequence[_Place], tensors: Sequence[Any]) -> list[Any]:
    """Return values with these tensors at these places."""
    new = list(values)
    for (place, index), tensor in zip(places, tensors, strict=True):
        if index is None:
            new[place] = tensor
        else:
            items = list(new[place])
            items[index] = tensor
            new[place] = type(new[place])(items)
    return new
