"""Backward passes: gradient functions called by TensorFlow, and the ops between them.

Owns the replacements of `imperative_grad`, of the gradient function of ops without actions, of the
functions of `tf.custom_gradient`, and of forward-mode differentiation. Ops with actions at
gradients are on the tapes as `taped.Taped`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import Plan
from amanda_core.interface import IPoint
from amanda_driver_tf.gradients.eager.edits import call_step, edited_gradient
from amanda_driver_tf.gradients.eager.gradient_calls import in_gradient
from amanda_driver_tf.gradients.eager.recompute import Recompute, first_run_of
from amanda_driver_tf.gradients.eager.taped import mark
from amanda_driver_tf.identity.frames import BETWEEN, BOUNDARY
from amanda_driver_tf.identity.places import Between, Place
from amanda_driver_tf.identity.program import LEFT
from amanda_driver_tf.identity.records import Record
from amanda_driver_tf.tensorflow_internals.originals import ORIGINALS, PAIR
from amanda_driver_tf.tensorflow_internals.tapes import executes_eagerly, no_tape
from amanda_driver_tf.threads import STATE

__all__ = ["CustomGradient", "differentiating", "gradient_function", "jvp", "record_operation"]


def differentiating(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `imperative_grad`, which runs one backward pass of a tape."""

    # Only little code before the call, as for layers: see `keras_calls`.
    def imperative_grad(*args: Any, **kwargs: Any) -> Any:
        before, place = STATE.eager, None
        try:
            place = _begin_pass()
            results = original(*args, **kwargs)
            STATE.eager = before
        except BaseException as error:
            STATE.eager = before
            if place is not None:
                place.session.raised(error)
            raise
        if place is not None:
            place.session.raise_pending()
        return results

    BOUNDARY.add(imperative_grad.__code__)
    return functools.update_wrapper(imperative_grad, original)


def _begin_pass() -> Place | None:
    """Leave the forward program if it is instrumented, and return the place to return to."""
    place: Place | None = STATE.eager
    if place is None or STATE.quiet or not place.session.enabled or not executes_eagerly():
        return None
    STATE.eager = Between(place.program) if place.session.wants_backward else None
    return place


def gradient_function(*call: Any) -> Any:
    """Compute the gradient of an op that is on a tape by itself: it has no actions, or is unknown.

    Args:
        call: Name of the op, attributes, number of inputs, inputs, outputs, gradients of outputs,
            indices of inputs that no tape tracks, and a name scope.
    """
    place: Place | None = STATE.eager
    record = _partner(call[1]) if place is not None else None
    if place is None or record is None or _is_settled(record, call[6], place):
        try:
            STATE.eager = None
            results = ORIGINALS.gradient_function(*call)
            STATE.eager = place
        except BaseException:
            STATE.eager = place
            raise
    else:
        compute = lambda: ORIGINALS.gradient_function(*call)  # noqa: E731
        results = in_gradient(place.program, record, call[6], compute)
    if record is not None:
        mark(results if isinstance(results, (list, tuple)) else [results], record)
    return results


def _is_settled(record: Record, skip: tuple[int, ...] | None, place: Place) -> bool:
    """Return True if the gradient of an op has no actions, and no tape records it."""
    return (
        record.settled == place.session.epoch
        and record.skip == skip
        and place.control.caching
        and no_tape()
    )


BOUNDARY.add(gradient_function.__code__)


def _partner(attrs: Any) -> Record | None:
    if attrs is None:
        return None
    for index in range(0, len(attrs), 2):
        # By identity, since comparing values of attributes is expensive.
        if attrs[index] is PAIR:
            return attrs[index + 1]  # type: ignore[no-any-return]
    return None


def jvp(
    op_name: str, attr_tuple: Any, inputs: Any, outputs: Any, tangents: Any, use_batch: bool = False
) -> Any:
    """Differentiate an op that is on a tape by itself in forward mode."""
    place, STATE.eager = STATE.eager, None
    try:
        if attr_tuple is not None:
            for index in range(0, len(attr_tuple), 2):
                if attr_tuple[index] is PAIR:
                    # TensorFlow caches the traced function by the op's attributes.
                    attr_tuple = attr_tuple[:index] + attr_tuple[index + 2 :]
                    break
        return ORIGINALS.jvp(op_name, attr_tuple, inputs, outputs, tangents, use_batch)
    finally:
        STATE.eager = place


class CustomGradient:
    """The gradient function of a call of a `tf.custom_gradient` function.

    Its ops are backward ops of the Identity with which TensorFlow ends such a function.
    """

    __slots__ = ("_function", "_plans", "_program", "_record")

    def __init__(self, place: Place, records: Sequence[Record | None], function: Any) -> None:
        self._program = place.program
        self._function = function
        self._record = next(record for record in records if record is not None)
        self._plans = [_plan_of(record) for record in records]

    def __call__(self, *grads: Any) -> Any:
        """Compute the gradients of the function's inputs, given those of its outputs."""
        session = self._program.session
        if session.closed or not session.enabled:
            if session.closed:
                session.warn_once(LEFT, BETWEEN)
            place, STATE.eager = STATE.eager, None
            try:
                return self._function(*grads)
            finally:
                STATE.eager = place
        folded = [self._fold(plan, grad) for plan, grad in zip(self._plans, grads, strict=True)]
        results = in_gradient(self._program, self._record, None, lambda: self._function(*folded))
        mark(results if isinstance(results, (list, tuple)) else [results], self._record)
        return results

    @staticmethod
    def _fold(plan: Plan | None, grad: Any) -> Any:
        if plan is None or not executes_eagerly():
            return grad
        for step in plan.steps:
            for _, new in call_step(step, [grad]):
                grad = edited_gradient(grad, new, step)
        return grad


BOUNDARY.add(CustomGradient.__call__.__code__)


def _plan_of(record: Record | None) -> Plan | None:
    context = record.context if record is not None else None
    plan = context.plan(IPoint.BEFORE_BACKWARD) if context is not None else None
    return plan or None


def record_operation(
    op_type: str,
    output_tensors: Any,
    input_tensors: Any,
    backward_function: Any,
    forward_function: Any = None,
) -> None:
    """Record an op with its own gradient function on the tapes."""
    place = STATE.eager
    first = first_run_of(op_type)
    if first is not None:
        backward_function = Recompute(first, backward_function)
    elif place is not None and output_tensors and executes_eagerly():
        sources = [getattr(tensor, "_amanda_source", None) for tensor in output_tensors]
        records = [s if isinstance(s, Record) and s.marks else None for s in sources]
        if any(record is not None for record in records):
            backward_function = CustomGradient(place, records, backward_function)
    ORIGINALS.record_operation(
        op_type, output_tensors, input_tensors, backward_function, forward_function
    )
