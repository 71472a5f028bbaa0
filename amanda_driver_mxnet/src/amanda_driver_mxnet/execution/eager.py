"""Imperative ops: analysis at the first execution, then the plan at each one.

Owns the execution of one op. `attachment` decides which calls are ops, `gradients` watches their
backward programs.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from mxnet import autograd
from mxnet.ndarray import NDArray

from amanda_core.driver_kit import (
    EagerExecution,
    EagerProgram,
    Known,
    OpCall,
    OpContext,
    OpRecord,
    Plan,
    Session,
    inside_routine,
    several,
    wants_gradients,
)
from amanda_core.interface import IPoint, Site
from amanda_driver_mxnet.gradients import Watch
from amanda_driver_mxnet.identity import NAMES
from amanda_driver_mxnet.mxnet_internals.arrays import needs_gradient
from amanda_driver_mxnet.routines import fold

__all__ = ["Call", "ImperativeProgram"]


@dataclass
class Call(OpCall):
    """One call of an operator. Its values are arrays.

    Attributes:
        out: Where it writes its results; None if it makes new arrays.
    """

    out: Any = None

    @property
    def states(self) -> Container[int]:
        """The positions of the inputs that the op writes."""
        if self.op_type.endswith("update"):
            return range(2, len(self.values))
        return [place for place, name in enumerate(self.names) if name.startswith("moving_")]


class ImperativeProgram(EagerProgram):
    """The imperative program of one thread.

    Attributes:
        watched: Whether gates were put on the tape since the last backward program.
    """

    def __init__(self, session: Session, namespace: str) -> None:
        self.watched = self._initialised = False
        super().__init__(session, namespace, NAMES)
        #: Handles of the arrays that ops made.
        self._made: Known[bool] = Known()

    def record(self, site: Site, caller: str) -> OpRecord:
        """Return a record of a new op."""
        if site.zone == "model" and self._initialised:
            # Blocks get parameters in their first call, maybe after the table of them was made.
            self.parameters.forget(self.activations[0].scope.root if self.activations else "")
        self._initialised = site.zone == "init"
        return OpRecord(site)

    def execute(self, call: Call) -> Any:
        """Execute an op of the program as planned."""
        handles = [array.handle for array in call.values]
        record = self.sites.locate(call.op_type, handles, {})
        return call.execute(call.values) if record is None else self.execute_at(record, call)

    def execute_at(self, record: OpRecord, call: Call) -> Any:
        """Execute an op with a known record as planned."""
        if self.is_idle(record):
            result = call.execute(call.values)
            self.note(call, record.site.zone, several(result))
            return result
        return _Execution(self, record, call).result()

    def note(self, call: Call, zone: str, arrays: Sequence[Any]) -> None:
        """Remember that an op of the model made these arrays: they are not parameters."""
        for array in arrays if zone == "model" and call.out is None else ():
            if isinstance(array, NDArray):
                self._made.set(array.handle, True)

    def constant(self, value: Any) -> Any:
        """Return an array, or None if an op made it."""
        return None if self._made.get(value.handle) else value


class _Execution(EagerExecution):
    """One execution of an op at which a tool may act.

    Args:
        program: The program.
        record: The record of the op.
        call: The call.
    """

    def __init__(self, program: ImperativeProgram, record: OpRecord, call: Call) -> None:
        super().__init__(program, record, call, constant=program.constant)
        self._program = program
        #: Positions of the values that the op changes in place, until it has run.
        self._states: Container[int] = call.states
        self._is_single = False

    def result(self) -> Any:
        """Execute the op as planned, and return what the program gets."""
        call = self.call
        new = self.run(call.values)
        if call.out is None:
            self._program.note(call, self.record.site.zone, new)
            return new[0] if self._is_single else new
        with autograd.pause(), inside_routine():
            for target, value in zip(several(call.out), new, strict=True):
                if value is not target:
                    target[:] = value
        return call.out

    def analysed(self, context: OpContext, point: IPoint) -> Plan:
        """Return the plan of the op at a point, after its analysis if it is new."""
        with autograd.pause(autograd.is_training()):
            return context.trigger_callback(point)

    def execute(self, plan: Plan, values: list[Any]) -> list[Any]:
        """Return values as the steps of a plan edit them."""
        return fold(plan, values, self._states)

    def computed(self, context: OpContext, result: Any) -> list[Any]:
        """Return the outputs of the op, or of its replacement, which has returned `result`."""
        outputs, self._states = several(result), ()
        self._is_single = not isinstance(result, (tuple, list))
        self._program.note(self.call, self.record.site.zone, outputs)
        return outputs

    def new_gates(self, context: OpContext, values: Sequence[Any]) -> Watch | None:
        """Return gates if a tool may want the gradients of the op, which runs on these values."""
        if not autograd.is_recording() or not wants_gradients(self.session, context):
            return None
        if self.call.out is not None:
            fix = "Leave out `out` while the program is recorded"
            self.refuse_gradient_edits(context, "writes to an array of its caller (out=)", fix)
            return None
        places = [place for place, value in enumerate(values) if needs_gradient(value)]
        self._program.watched = self._program.watched or bool(places)
        return Watch(self.session, context, places, len(values)) if places else None
