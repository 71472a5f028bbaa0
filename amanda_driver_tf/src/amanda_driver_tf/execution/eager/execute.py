"""One execution of one op: analysis, edits before, the op or its replacement, edits after.

Owns the order of these, for forward and backward ops alike, and what is recorded on tapes: the op
as it ran, with its inputs before straight-through edits. `places` identifies the op; `taped`
handles the aligned gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from amanda_core.driver_kit import (
    DriverFailures,
    OpContext,
    OriginalCall,
    Plan,
    Session,
    Step,
    standing_for,
)
from amanda_core.interface import AmandaError, IPoint, RoutineResultError, is_annotated
from amanda_driver_tf.execution.eager.operator import Attributes, EagerOp
from amanda_driver_tf.gradients.eager.edits import call_step, edited, is_trainable
from amanda_driver_tf.gradients.eager.taped import Taped, record_on_tapes, skipped
from amanda_driver_tf.gradients.eager.taps import tap_inputs, tap_outputs
from amanda_driver_tf.identity.places import Forward, Place
from amanda_driver_tf.identity.records import Record
from amanda_driver_tf.operators.op_types import PASS, READ
from amanda_driver_tf.operators.signature import flattened, grouped, signature_of
from amanda_driver_tf.tensorflow_internals.modules import dtypes, ops
from amanda_driver_tf.tensorflow_internals.objects import keep_from_keras
from amanda_driver_tf.tensorflow_internals.originals import ORIGINALS, PAIR, record_gradient
from amanda_driver_tf.tensorflow_internals.tapes import call_unrecorded, no_tape
from amanda_driver_tf.threads import STATE, call_quietly

__all__ = ["Call", "Run", "aligned_plans", "constant", "is_plain", "run", "tag"]


class Call:
    """The arguments of `execute.execute`; `run` calls the original with other inputs."""

    __slots__ = ("attrs", "ctx", "inputs", "name", "number", "op_type")

    def __init__(
        self,
        op_type: str,
        number: int,
        inputs: Sequence[Any],
        attrs: Any,
        ctx: Any,
        name: str | None,
    ) -> None:
        self.op_type, self.number, self.inputs = op_type, number, inputs
        self.attrs, self.ctx, self.name = attrs, ctx, name

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Execute the op on flat inputs, without recording it on tapes."""
        # An op that calls the user's Python counts as one op.
        place = STATE.eager
        try:
            STATE.eager = None
            outputs = ORIGINALS.execute(
                self.op_type.encode(), self.number, list(inputs), self.attrs, self.ctx, self.name
            )
            STATE.eager = place
        except BaseException:
            STATE.eager = place
            raise
        return outputs if isinstance(outputs, list) else list(outputs or ())


def run(
    place: Place, record: Record, call: Call, plain: Sequence[bool], records: bool
) -> list[Any]:
    """Execute an op as the applied tools request, and record it on the tapes.

    Args:
        place: Where it runs.
        record: Its record.
        call: The call.
        plain: Which arguments were written as constants, by position, if known.
        records: Whether its caller wants it on the tapes.

    Returns:
        Its outputs.
    """
    failures = place.program.session.failures
    original = failures.original(call.run)
    try:
        return Run(place, record, call, plain, records, original).outputs()
    except BaseException as error:
        if isinstance(error, Exception) and failures.is_drivers(error, original):
            return _without_instrumentation(error, failures, record, call, records, original)
        if isinstance(error, AmandaError) or is_annotated(error):
            # Otherwise Keras would replace it by an exception made from the message.
            keep_from_keras(error)
            if record.swallows and isinstance(error, (TypeError, ValueError)):
                place.program.session.defer(error)
        raise
    finally:
        original.forget()


def _without_instrumentation(
    error: Exception,
    failures: DriverFailures,
    record: Record,
    call: Call,
    records: bool,
    original: OriginalCall,
) -> list[Any]:
    """Return the plain outputs of an op at which the driver failed, if allowed; else raise."""
    site = record.site
    outputs: list[Any] = failures.recover(
        error, site.namespace, site.name, original, (call.inputs,)
    )
    if records and outputs and not no_tape():
        record_gradient(call.op_type, tuple(call.inputs), call.attrs, outputs)
    return outputs


class Run:
    """The instrumented execution of one call."""

    def __init__(
        self,
        place: Place,
        record: Record,
        call: Call,
        plain: Sequence[bool],
        records: bool,
        original: OriginalCall,
    ) -> None:
        self.original = original
        self.program = place.program
        self.session: Session = place.program.session
        self.place, self.record, self.call = place, record, call
        self.attributes = Attributes(call.op_type, call.attrs)
        signature = signature_of(call.op_type)
        self.names = signature.names if signature is not None else ()
        self.lengths: tuple[int | None, ...] = (
            signature.lengths(self.attributes.raw)
            if signature is not None
            else (None,) * len(call.inputs)
        )
        self.recording = records and not no_tape()
        #: The inputs before straight-through edits, which are recorded on the tapes.
        self.origins = grouped(call.inputs, self.lengths)
        _mark_constants(plain, self.origins)
        #: The inputs that the op runs on.
        self.values = list(self.origins)
        self.op = EagerOp(call.op_type, record.site.name, self.attributes, call.inputs)

    def outputs(self) -> list[Any]:
        """Execute the call, and return its outputs."""
        record, session = self.record, self.session
        forward = record.forward
        backward = record.backward
        if forward is not None and forward.context is None:
            forward, backward = None, True
        context = record.context = session.open(
            record.site,
            self.op,
            inputs=self.values,
            attrs=self.attributes,
            forward=forward.context if forward is not None else None,
            input_names=self.names,
            backward=backward,
            constant=constant,
            recomputed=isinstance(self.place, Forward) and self.place.recomputed,
        )
        try:
            return self._run(context)
        finally:
            context.release()
            self.op.release()

    def _run(self, context: OpContext) -> list[Any]:
        record, backward = self.record, self.record.backward
        first, last = (
            (IPoint.BEFORE_BACKWARD, IPoint.AFTER_BACKWARD)
            if backward
            else (IPoint.BEFORE_FORWARD, IPoint.AFTER_FORWARD)
        )
        edits = self.program.edits
        if backward:
            context.fill(grad_outputs=self.values)
        before = self._analyse(context, first)
        if before.steps:
            self._edit_inputs(before)
            self._fill_inputs(context)
        if before.replacement is not None:
            outputs = self._replace(before.replacement, context)
            self.original.keep(outputs)
        else:
            inputs = flattened(self.values, self.lengths)
            outputs = self.original(inputs)
            tag(record, inputs[0] if inputs else None, outputs[0] if outputs else None)
        self.op.ran(outputs)
        if backward:
            context.fill(grad_inputs=outputs)
        else:
            context.fill(outputs=outputs)
        after = self._analyse(context, last)
        aligned = (_NONE, _NONE) if backward else aligned_plans(context)
        settled = not (before or after or aligned[0] or aligned[1])
        if self.recording and before.replacement is None:
            self._record_on_tapes(context, outputs, aligned, settled)
        if after.steps:
            outputs = self._edit_outputs(after, outputs)
        self._note(settled, is_edited=self.program.edits != edits)
        return outputs

    def _note(self, settled: bool, is_edited: bool) -> None:
        """Note in the record whether tools act at the op, and whether they have edited a value."""
        record, session = self.record, self.session
        if not settled:
            record.planned = session.epoch
            if is_edited:
                record.edited = session.epoch
        elif session.caching and all(read.idle == session.epoch for read in record.reads):
            record.idle = session.epoch

    def _fill_inputs(self, context: OpContext) -> None:
        if self.record.backward:
            context.fill(grad_outputs=self.values)
        else:
            context.fill(inputs=self.values)

    def _analyse(self, context: OpContext, i_point: IPoint) -> Plan:
        if self.session.due(context, i_point):
            return call_unrecorded(context.trigger_callback, i_point)
        return context.trigger_callback(i_point)

    # Inputs.

    def _edit_inputs(self, plan: Plan) -> None:
        for step in plan.steps:
            for position, new in call_step(step, self.values):
                self.program.edits += 1
                old = self.values[position]
                self.values[position] = edited(old, new, step)
                if step.action.autodiff:
                    self.origins[position] = self.values[position]

    # The op.

    def _replace(self, step: Step, context: OpContext) -> list[Any]:
        """Return the outputs of a replacement, which is differentiated as written."""
        aligned = (_NONE, _NONE) if self.record.backward else aligned_plans(context)
        self.program.edits += 1
        own_backward = self.recording and aligned[0].replacement is not None
        values = self.values
        if self.recording and not own_backward and aligned[1]:
            values = tap_inputs(self.program, aligned[1], values)
        replace = partial(step.replace, values, empty=not self.call.number)
        with standing_for(self._original):
            result = call_unrecorded(replace) if own_backward else replace()
        if result is None:
            result = []
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        if len(results) != self.call.number:
            raise RoutineResultError(
                f"A replacement returned {len(results)} values, but {self.call.op_type} has "
                f"{self.call.number}",
                where=step.where,
                fix="Return what the op would have returned",
            )
        outputs = [
            r if isinstance(r, ops.EagerTensor) else call_quietly(ops.convert_to_tensor, r)
            for r in results
        ]
        if own_backward:
            self._record_on_tapes(context, outputs, aligned, settled=False)
        elif self.recording and aligned[0]:
            outputs = tap_outputs(self.program, aligned[0], outputs)
        return outputs

    def _original(self, values: Sequence[Any]) -> Any:
        """Run the original op on these inputs, recorded on the tapes."""
        call, inputs = self.call, flattened(list(values), self.lengths)
        outputs = call.run(inputs)
        record_gradient(call.op_type, tuple(inputs), call.attrs, outputs)
        return outputs

    # Tapes.

    def _record_on_tapes(
        self,
        context: OpContext,
        outputs: list[Any],
        aligned: tuple[Plan, Plan],
        settled: bool,
    ) -> None:
        record, session, call = self.record, self.session, self.call
        if session.caching and not any(is_trainable(output) for output in outputs):
            record.settled = session.epoch  # It never gets a gradient.
        if not outputs:
            return
        origins = flattened(self.origins, self.lengths)
        values = flattened(self.values, self.lengths)
        ours = (
            not settled
            or any(origin is not value for origin, value in zip(origins, values, strict=True))
            or (session.wants_backward and record.settled != session.epoch)
        )
        if not ours:
            pair = (PAIR, record) if session.wants_backward else ()
            record_gradient(call.op_type, origins, (*(call.attrs or ()), *pair), outputs)
            return
        taped = Taped(
            self.program,
            record,
            context,
            (call.op_type, call.attrs),
            values,
            list(outputs),
            self.lengths,
            skipped(origins),
            aligned,
        )
        record_on_tapes(call.op_type, outputs, origins, taped)

    # Outputs.

    def _edit_outputs(self, plan: Plan, outputs: list[Any]) -> list[Any]:
        outputs = list(outputs)
        for step in plan.steps:
            for position, new in call_step(step, outputs):
                self.program.edits += 1
                outputs[position] = edited(outputs[position], new, step)
        return outputs


_NONE = Plan()
# Types of arguments that programs write for constants.
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, np.ndarray, np.generic)


def aligned_plans(context: OpContext) -> tuple[Plan, Plan]:
    """Return the plans for the gradients of a forward op as a whole."""
    return context.plan(IPoint.BEFORE_BACKWARD), context.plan(IPoint.AFTER_BACKWARD)


def tag(record: Record, value: Any, output: Any) -> None:
    """Mark an output with the variable that it stands for, or with the op whose gradient it is.

    Args:
        record: The op.
        value: Its first input, or None.
        output: Its only output, all of several, or None if it has none.
    """
    kind = record.op_type.kind
    if isinstance(output, (list, tuple)):
        output = output[0] if output else None
    if record.backward or output is None:
        return
    if kind == READ:
        output._amanda_source = record.token
    elif record.marks:
        output._amanda_source = record
    elif kind == PASS and value._amanda_source.__class__ is int:
        output._amanda_source = value._amanda_source


def constant(value: Any) -> Any:
    """Return an input if it is a variable's value or was not computed by the program, else None."""
    if isinstance(value, list):
        return None if any(constant(item) is None for item in value) else value
    if not isinstance(value, ops.EagerTensor):
        return value
    source = value._amanda_source
    known = source.__class__ is int and source >= 0 and value.dtype != dtypes.resource
    return value if known else None


def _mark_constants(plain: Sequence[bool], values: Sequence[Any]) -> None:
    for written, value in zip(plain, values, strict=False):
        if written and isinstance(value, ops.EagerTensor) and value._amanda_source is None:
            value._amanda_source = 0


def is_plain(value: Any) -> bool:
    """Return True if an argument was written as a constant."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    return isinstance(value, _PLAIN_TYPES)
