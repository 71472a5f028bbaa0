"""The parts of a program in which a thread's ops run: forward, gradient functions, or in between.

Owns which record an op has at each of these places. `execution.eager` runs the op;
`gradients.eager.backward` and `interception.eager_operators` change the place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import OCCURRENCES, OUTSIDE, Activation
from amanda_driver_tf.identity.program import EagerProgram
from amanda_driver_tf.identity.records import Operands, Record, backward_site
from amanda_driver_tf.identity.rules import operands_of
from amanda_driver_tf.identity.tokens import TOKENS
from amanda_driver_tf.operators.op_types import READ, OpType
from amanda_driver_tf.tensorflow_internals.modules import ops

__all__ = ["Between", "Forward", "InGradient", "Place"]

_EagerTensor = ops.EagerTensor
_frame = sys._getframe


class Place:
    """A place where ops run."""

    __slots__ = ("control", "program", "session")

    def __init__(self, program: EagerProgram) -> None:
        self.program, self.session, self.control = program, program.session, program.control

    def locate(self, op_type: OpType, args: Sequence[Any]) -> Record | None:
        """Return the record of an op that is being called, or None if it is not instrumented.

        Args:
            op_type: The op type.
            args: The arguments. The op's caller must be the caller of the caller of this method.
        """
        raise NotImplementedError


class Forward(Place):
    """The forward program.

    Attributes:
        activations: Calls of layers, outermost first, after an entry for ops outside of layers.
        recomputed: Whether this recomputes an earlier run.
    """

    __slots__ = ("activations", "recomputed")

    def __init__(self, program: EagerProgram, activations: Sequence[Activation] = ()) -> None:
        super().__init__(program)
        self.activations: list[Activation] = list(activations) or [Activation(OUTSIDE)]
        self.recomputed = False

    def locate(self, op_type: OpType, args: Sequence[Any]) -> Record | None:
        """Return the record of an op of the forward program."""
        # A single function, since this runs at every op.
        activation = self.activations[-1]
        scope = activation.scope
        if op_type.kind == READ:
            value = args[0]
            token = value._amanda_source
            if token.__class__ is not int:
                token = TOKENS.of(value)
            return self.program.sites.read(activation, op_type, token)
        operands: Operands = ()
        for value in args[: op_type.count]:
            if type(value) is not _EagerTensor or value._amanda_source is not None:
                operands = operands_of(op_type, args, bool(scope.root))
                break
        else:
            if op_type.handles:
                operands = operands_of(op_type, args, bool(scope.root))
        # The op that followed last time, if it is called from the same place again.
        last = activation.last
        expected: Record | None = (
            last.next if last is not None else self.program.sites.firsts.get(scope.number)
        )
        if expected is None or expected.op_type is not op_type or expected.operands != operands:
            return self._look_up(op_type, operands)
        if expected.call_site is None or not expected.call_site.here():
            return self._look_up(op_type, operands)
        if scope.root:
            group, counts = expected.group, activation.counts
            occurrence = counts.get(group, 0)
            if occurrence != expected.occurrence:
                return self._look_up(op_type, operands)
            counts[group] = occurrence + 1
        activation.last = expected
        return expected if expected.watched else None

    def _look_up(self, op_type: OpType, operands: Operands) -> Record | None:
        activation = self.activations[-1]
        found = self.program.sites.look_up(activation, op_type, operands, _frame(3))
        return found if found.watched else None


class InGradient(Place):
    """Inside the gradient function of one op.

    Attributes:
        record: The record of that op.
        executed: Records of the ops that ran so far.
    """

    __slots__ = ("_counts", "executed", "record")

    def __init__(self, program: EagerProgram, record: Record) -> None:
        super().__init__(program)
        self.record = record
        self.executed: list[Record] = []
        self._counts: dict[Any, int] = {}

    def locate(self, op_type: OpType, args: Sequence[Any]) -> Record | None:
        """Return the record of an op that the gradient function calls."""
        frame = _frame(2)
        found = self.program.sites.frames(frame)
        key = (op_type.name, *((code.number, offset) for code, offset in found))
        occurrence = self._counts.get(key, 0)
        self._counts[key] = occurrence + 1
        occurrence = min(occurrence, OCCURRENCES)
        known = self.record.children
        record = known.get((key, occurrence))
        if record is None:
            forward = self.record.forward if self.record.backward else self.record
            names = (forward or self.record).names
            number = names[op_type.name] = names.get(op_type.name, 0) + 1
            stable = (
                # Gradients of gradients belong to the same forward op.
                *((self.record.number,) if self.record.backward else ()),
                op_type.name,
                tuple((*code.label, offset) for code, offset in found),
                occurrence,
            )
            source = self.program.sites.source(frame)
            site = backward_site(op_type.name, stable, forward, number, source)
            record = Record(site, op_type, forward=forward, backward=True)
            known[key, occurrence] = record
        self.executed.append(record)
        return record


class Between(Place):
    """Inside a backward pass, between gradient functions, where gradients are accumulated."""

    __slots__ = ("_counts",)

    def __init__(self, program: EagerProgram) -> None:
        super().__init__(program)
        self._counts: dict[Any, int] = {}

    def locate(self, op_type: OpType, args: Sequence[Any]) -> Record | None:
        """Return the record of an op that the tape itself calls."""
        # Sums of gradients are identified by the ops whose gradients are summed.
        values = args[0] if args and isinstance(args[0], (list, tuple)) else args
        sources = tuple(
            source.number
            for source in (getattr(value, "_amanda_source", None) for value in values)
            if isinstance(source, Record)
        )
        frame = _frame(2)
        found = self.program.sites.frames(frame)
        key: Any = (op_type.name, sources, tuple((*code.label, offset) for code, offset in found))
        if sources:
            occurrence = self._counts.get(key, 0)
            self._counts[key] = occurrence + 1
            key = (*key, min(occurrence, OCCURRENCES))
        return self.program.between(op_type, key, frame)
