"""`Taped`: the gradient function of one execution of one op, on the tapes that recorded it.

Owns the aligned view: the gradients that arrive at an op's outputs, those that it gives to its
inputs, and the replacement of its whole backward. It outlives `apply`; edits of the forward pass
are then still valid, but routines no longer run. `places` sees raw backward ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import OpContext, OriginalCall, Plan, Step
from amanda_core.interface import RoutineResultError, UnsupportedError
from amanda_driver_tf.gradients.eager.edits import (
    call_step,
    check_gradient,
    edited_gradient,
    is_trainable,
)
from amanda_driver_tf.gradients.eager.gradient_calls import in_gradient, unsupported_in_graph
from amanda_driver_tf.gradients.eager.hosted import hosted, is_vectorised
from amanda_driver_tf.identity.frames import BETWEEN, BOUNDARY
from amanda_driver_tf.identity.program import LEFT, EagerProgram
from amanda_driver_tf.identity.records import Record
from amanda_driver_tf.operators.signature import flattened, grouped
from amanda_driver_tf.tensorflow_internals.originals import ORIGINALS
from amanda_driver_tf.tensorflow_internals.tapes import executes_eagerly, is_recorded
from amanda_driver_tf.threads import STATE, call_quietly

__all__ = [
    "Taped",
    "compute",
    "mark",
    "record_on_tapes",
    "skipped",
]


class Taped:
    """Computes the gradients of an op's inputs, given those of its outputs.

    Args:
        program: The program that it ran in.
        record: Record of the op.
        context: Its context.
        call: The op's name and attributes.
        inputs: The inputs that the op ran on, flat.
        outputs: Its outputs.
        lengths: The layout of the inputs by position.
        skip: Indices of the inputs that no tape tracks, as `skipped` returns them.
        aligned: The plans for the gradients of its outputs and inputs.
    """

    __slots__ = (
        "_after",
        "_applied",
        "_attrs",
        "_before",
        "_context",
        "_inputs",
        "_lengths",
        "_name",
        "_outputs",
        "_program",
        "_record",
        "_skip",
    )

    def __init__(
        self,
        program: EagerProgram,
        record: Record,
        context: OpContext,
        call: tuple[str, Any],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        lengths: Sequence[int | None],
        skip: tuple[int, ...] | None,
        aligned: tuple[Plan, Plan],
    ) -> None:
        self._program, self._record, self._context = program, record, context
        self._name, self._attrs = call
        self._inputs, self._outputs = inputs, outputs
        self._lengths, self._skip = lengths, skip
        # As they were when the op ran.
        self._before, self._after = aligned
        self._applied = program.applied()

    def __call__(self, *out_grads: Any) -> list[Any]:
        """Compute the gradients of the inputs, flat, given those of the outputs."""
        session = self._program.session
        if session.closed:
            session.warn_once(LEFT, BETWEEN)
        elif session.enabled:
            if executes_eagerly():
                return self._guarded(out_grads)
            return self._symbolic(out_grads)
        return self._plain(out_grads)

    def forward(self, *tangents: Any) -> Any:
        """Differentiate the op in forward mode: return tangents of its outputs, given those of its
        inputs.
        """
        call = self._name, self._attrs or (), self._inputs, self._outputs, list(tangents)
        return call_quietly(ORIGINALS.jvp, *call)

    def _compute(self, out_grads: Sequence[Any]) -> list[Any]:
        return compute(self._name, self._attrs, self._inputs, self._outputs, out_grads, self._skip)

    def _plain(self, out_grads: Sequence[Any]) -> list[Any]:
        place, STATE.eager = STATE.eager, None
        try:
            if self._before.replacement is not None:
                self._refuse_replacement()
            results = self._compute(out_grads)
            STATE.eager = place
            return results
        except BaseException:
            STATE.eager = place
            raise

    def _refuse_replacement(self) -> None:
        step = self._before.replacement
        assert step is not None
        raise UnsupportedError(
            "The backward of this op was replaced by a routine of a tool that is no longer active",
            where=step.where,
            fix="Compute the gradient inside `apply`",
        )

    def _guarded(self, out_grads: Sequence[Any]) -> list[Any]:
        """Compute instrumented gradients; if the driver itself fails, plain ones if allowed."""
        failures = self._program.session.failures
        original = failures.original(self._compute)
        try:
            return self._instrumented(out_grads, original)
        except Exception as error:
            if not failures.is_drivers(error, original):
                raise
            site = self._record.site
            results: list[Any] = failures.recover(
                error, site.namespace, site.name, original, (out_grads,)
            )
            return results
        finally:
            original.forget()

    def _instrumented(self, out_grads: Sequence[Any], original: OriginalCall) -> list[Any]:
        self._applied.miss()
        grads: Sequence[Any] = out_grads
        if self._before.steps:
            grads = self._fold(self._before, grads)
        if self._before.replacement is not None:
            if not self._is_applied(self._before.replacement):
                self._refuse_replacement()
            results = self._replaced(self._before.replacement, grads)
        else:
            results = in_gradient(self._program, self._record, self._skip, lambda: original(grads))
        if self._after.steps:
            folded = self._fold(self._after, grouped(results, self._lengths))
            results = flattened(folded, self._lengths)
        mark(results, self._record)
        return results

    def _is_applied(self, step: Step) -> bool:
        if any(step.action.tool is tool for tool in self._program.session.tools):
            return True
        self._program.session.warn_once(LEFT, BETWEEN)
        return False

    def _fold(self, plan: Plan, grads: Sequence[Any]) -> list[Any]:
        values = list(grads)
        for step in plan.steps:
            if not self._is_applied(step):
                continue
            for position, new in call_step(step, values):
                values[position] = edited_gradient(values[position], new, step)
        return values

    def _replaced(self, step: Step, grads: Sequence[Any]) -> list[Any]:
        # If this pass is differentiated, the replacement is differentiated as written.
        given = self._by_position(step, step.replace(list(grads)))
        lists = [
            value if length is None else _gradients_of_list(step, position, value, length)
            for position, (value, length) in enumerate(zip(given, self._lengths, strict=True))
        ]
        results = flattened(lists, self._lengths)
        for index, (result, tensor) in enumerate(zip(results, self._inputs, strict=True)):
            if not self._is_differentiable(index):
                results[index] = None
            else:
                check_gradient(result, tensor.shape, step.where)
        return results

    def _by_position(self, step: Step, given: Any) -> list[Any]:
        """Return the gradients that a replacement has returned, one for each position.

        A single gradient is that of the only differentiable input.
        """
        lengths, skip = self._lengths, self._skip or ()
        wanted = [
            position
            for position, tensors in enumerate(grouped(range(len(self._inputs)), lengths))
            if any(
                index not in skip and self._is_differentiable(index)
                for index in (tensors if isinstance(tensors, list) else [tensors])
            )
        ]
        last = wanted[-1] if wanted else -1
        single = len(wanted) == 1
        if not isinstance(given, (tuple, list)):
            if not single:
                self._wrong_count(step, "one gradient", last)
            given = [None] * last + ([given] if lengths[last] is None else [[given]])
        elif single and last and len(given) == 1:
            given = [None] * last + list(given)
        extra = any(value is not None for value in given[len(lengths) :])
        if len(given) <= last or extra:
            self._wrong_count(step, f"{len(given)} gradients", last)
        return [*given[: len(lengths)], *[None] * (len(lengths) - len(given))]

    def _is_differentiable(self, index: int) -> bool:
        return is_trainable(self._inputs[index])

    def _wrong_count(self, step: Step, given: str, last: int) -> None:
        raise RoutineResultError(
            f"A replacement of a backward op returned {given}, but input {last} is differentiable",
            where=step.where,
            fix="Return one gradient for each input up to the last differentiable one",
        )

    # While a graph is built, observers on the host do not see it. Edits on the host run as nodes of
    # a vectorized Jacobian, and are refused in other graphs, which the program may keep.

    def _symbolic(self, out_grads: Sequence[Any]) -> list[Any]:
        replacement = self._before.replacement
        steps = [*self._before.steps, *self._after.steps, *([replacement] if replacement else ())]
        hosts = [step for step in steps if not step.action.staged]
        edits = [step for step in hosts if not step.action.observe]
        if edits and (replacement in hosts or not is_vectorised()):
            raise unsupported_in_graph(edits[0].where)
        if len(hosts) > len(edits):
            self._program.note_graph(self._record)
        grads = self._fold_symbolic(self._before, out_grads)
        if replacement is not None:
            results = self._replaced(replacement, grads)
        else:
            results = in_gradient(
                self._program, self._record, self._skip, lambda: self._compute(grads)
            )
        return flattened(
            self._fold_symbolic(self._after, grouped(results, self._lengths)), self._lengths
        )

    def _fold_symbolic(self, plan: Plan, gradients: Sequence[Any]) -> list[Any]:
        values = list(gradients)
        for step in plan.steps:
            if step.action.staged:
                for position, new in step(values):
                    values[position] = new
            elif not step.action.observe:
                values = hosted(self._program.session, step, values, self._is_applied)
        return values


BOUNDARY.add(Taped.__call__.__code__)


def _gradients_of_list(step: Step, position: int, given: Any, length: int) -> list[Any]:
    """Return a replacement's gradients for an input that is a list of tensors."""
    gradients = [None] * length if given is None else list(given)
    if len(gradients) != length:
        raise RoutineResultError(
            f"A replacement of a backward op returned {len(gradients)} gradients for input "
            f"{position}, which is a list of {length} tensors",
            where=step.where,
            fix="Return a list with a gradient for each tensor, or None",
        )
    return gradients


def compute(
    name: str,
    attrs: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    out_grads: Sequence[Any],
    skip: tuple[int, ...] | None,
) -> list[Any]:
    """Return the results of TensorFlow's own gradient function of an op, one for each input.

    Args:
        name: The type of the op.
        attrs: The attributes of the op, as a flat tuple of names and values; None for none.
        inputs: The tensors that the op got.
        outputs: The tensors that it returned.
        out_grads: The gradients of the outputs.
        skip: Indices of the inputs whose gradients are not needed, as `skipped` returns them.

    Returns:
        The gradients of the inputs; None for an input that has none.
    """
    results = ORIGINALS.gradient_function(
        name, attrs or (), len(inputs), inputs, outputs, tuple(out_grads), skip, None
    )
    listed = list(results) if isinstance(results, (list, tuple)) else [results]
    return listed + [None] * (len(inputs) - len(listed))


def skipped(inputs: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the indices of inputs that no tape tracks, to pass to a gradient function as `skip`.

    Returns:
        The indices in order; None if tapes track all inputs, because TensorFlow takes no empty
        tuple.
    """
    asked = is_recorded
    return tuple(i for i, tensor in enumerate(inputs) if not asked([tensor])) or None


def mark(results: Sequence[Any], record: Record) -> None:
    """Mark gradients with their op, for the ops that sum them."""
    for result in results:
        # The gradient may be a tensor marked as the value of a variable.
        if result is not None and getattr(result, "_amanda_source", None).__class__ is not int:
            try:
                result._amanda_source = record
            except AttributeError:
                return


def record_on_tapes(name: str, outputs: Sequence[Any], inputs: Sequence[Any], taped: Taped) -> None:
    """Record an execution on the tapes of this thread."""
    ORIGINALS.record_operation(name, list(outputs), list(inputs), taped, taped.forward)
