"""Recomputation (`tf.recompute_grad`): reruns a function under the tools of its first run.

Owns the state of the first run, and the rerun inside a gradient. The ops of the rerun are forward
ops again: the same edits apply to them, and their contexts are marked as recomputed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from amanda_core.driver_kit import Activation, Tool
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.identity.frames import BOUNDARY
from amanda_driver_tf.identity.places import Forward
from amanda_driver_tf.identity.program import EagerProgram
from amanda_driver_tf.identity.records import Record
from amanda_driver_tf.identity.rules import operands_of
from amanda_driver_tf.identity.tokens import TOKENS
from amanda_driver_tf.operators.op_types import READ, OpType
from amanda_driver_tf.tensorflow_internals.modules import custom_gradient
from amanda_driver_tf.tensorflow_internals.names import CALLERS_OF_RECOMPUTED
from amanda_driver_tf.tensorflow_internals.nested_code import nested_codes
from amanda_driver_tf.tensorflow_internals.originals import ORIGINALS
from amanda_driver_tf.tensorflow_internals.tapes import executes_eagerly
from amanda_driver_tf.threads import STATE

__all__ = ["FirstRun", "Recompute", "first_run_of", "stop_recording"]


# The functions inside `recompute_grad` that call the user's function in each of the two runs.
_CALLERS = {
    name: code
    for name, code in nested_codes(custom_gradient.recompute_grad).items()
    if name in CALLERS_OF_RECOMPUTED
}
# Call sites end at the same frame in both runs.
BOUNDARY.update(_CALLERS.values())


class FirstRun:
    """The place and tools of the first run of a recomputed function.

    Attributes:
        edited: Whether anything was edited in it.
    """

    def __init__(self, place: Forward) -> None:
        self.program = place.program
        self._activations = [activation.copy() for activation in place.activations]
        self._tools: Sequence[Tool] = self.program.session.tools
        self._enabled = self.program.session.control.enabled
        self._edits = self.program.edits
        self.edited = False

    def end(self) -> None:
        """Note whether the first run, which has ended, edited anything."""
        self.edited = self.program.edits != self._edits

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Restore the state of the first run during a rerun."""
        session = self.program.session
        control = session.control
        place = Rerun(self.program, [activation.copy() for activation in self._activations])
        before, enabled = STATE.eager, control.enabled
        same = self._tools == session.tools
        with nullcontext() if same else session.as_of(self._tools):
            # If the first run was not instrumented, the rerun is not, either.
            STATE.eager, control.enabled = place, self._enabled
            try:
                yield
            finally:
                STATE.eager, control.enabled = before, enabled


def stop_recording() -> AbstractContextManager[None]:
    """Replace `record.stop_recording`, inside which a recomputed function first runs."""
    place = STATE.eager
    if (
        isinstance(place, Forward)
        and sys._getframe(1).f_code is _CALLERS.get("inner")
        and executes_eagerly()
    ):
        return _first_run(place)
    return ORIGINALS.stop_recording()  # type: ignore[no-any-return]


@contextmanager
def _first_run(place: Forward) -> Iterator[None]:
    first = FirstRun(place)
    with ORIGINALS.stop_recording():
        yield
    first.end()
    STATE.first_run = first


class Recompute:
    """The gradient function of a recomputed function: reruns and differentiates it."""

    __slots__ = ("_first", "_function")

    def __init__(self, first: FirstRun, function: Any) -> None:
        self._first, self._function = first, function

    def __call__(self, *grads: Any) -> Any:
        """Compute the gradients of the function's inputs, given those of its outputs."""
        if not executes_eagerly():
            if self._first.edited:
                self._refuse("while TensorFlow builds a graph of the gradient")
            return self._function(*grads)
        if self._first.program.session.closed:
            if self._first.edited:
                self._refuse("after `apply` ended")
            return self._function(*grads)
        with self._first.resumed():
            return self._function(*grads)

    @staticmethod
    def _refuse(when: str) -> None:
        raise UnsupportedError(
            f"An instrumented function is recomputed {when}, where it cannot be instrumented again",
            where="tf.recompute_grad",
            fix="Compute the gradient eagerly, inside `apply`",
        )


BOUNDARY.add(Recompute.__call__.__code__)


class Rerun(Forward):
    """The forward program of a function that is recomputed inside a gradient."""

    __slots__ = ()

    def __init__(self, program: EagerProgram, activations: Sequence[Activation]) -> None:
        super().__init__(program, activations)
        self.recomputed = True

    def locate(self, op_type: OpType, args: Sequence[Any]) -> Record | None:
        """Return the record of an op of the function; None for TensorFlow's own ops around it."""
        activation = self.activations[-1]
        if op_type.kind == READ:
            return self.program.sites.read(activation, op_type, TOKENS.of(args[0]))
        frame = sys._getframe(2)
        found, end = self.program.sites.ends_at(frame, activation.scope)
        if not found or end is Recompute.__call__.__code__:
            return None
        operands = operands_of(op_type, args, bool(activation.scope.root))
        record = self.program.sites.look_up(activation, op_type, operands, frame)
        return record if record.watched else None


def first_run_of(op_type: str) -> FirstRun | None:
    """Return the first run of the function that is being recorded on the tapes, or None."""
    first: FirstRun | None = STATE.first_run
    if first is None or op_type != "inner":
        return None
    STATE.first_run = None
    return first
