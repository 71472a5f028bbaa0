"""Functions of TensorFlow that are replaced while any session is attached.

Owns the replacements, and the decision at each op whether the calling thread is instrumented and
whether the op has actions. `execution.eager` runs these, `gradients.eager` handles backward passes,
`keras_calls` calls of Keras, and `replicas` threads of distribution strategies. The module is a
little over 400 lines because it follows one op from TensorFlow's first function to the second.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from amanda_core.driver_kit import THREAD, Activation, Control, Patches, Scope
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.execution.eager.execute import Call, is_plain, run, tag
from amanda_driver_tf.gradients.eager import backward, recompute
from amanda_driver_tf.identity.places import Forward, Place
from amanda_driver_tf.identity.records import Record
from amanda_driver_tf.identity.tokens import TOKENS
from amanda_driver_tf.interception import keras_calls, replicas
from amanda_driver_tf.interception.serialization import WRITING
from amanda_driver_tf.interceptor_choice import INTERCEPTORS
from amanda_driver_tf.operators.op_types import OPAQUE, PASS, READ, OpType, op_type_of
from amanda_driver_tf.tensorflow_internals import extension
from amanda_driver_tf.tensorflow_internals.eager_checks import problems
from amanda_driver_tf.tensorflow_internals.entry_points import (
    ADD_OP_CALLBACK,
    EXECUTE,
    FAST_PATH,
    GRADIENT_FUNCTION,
    IMPERATIVE_GRAD,
    JVP,
    MUST_RECORD_GRADIENT,
    RECORD_OPERATION,
    REMOVE_OP_CALLBACK,
    STOP_RECORDING,
    WATCH,
)
from amanda_driver_tf.tensorflow_internals.modules import execute, ops
from amanda_driver_tf.tensorflow_internals.objects import variable_handle
from amanda_driver_tf.tensorflow_internals.originals import ORIGINALS, PAIR, record_gradient
from amanda_driver_tf.tensorflow_internals.tapes import (
    FallbackException,
    is_recorded,
    no_tape,
    register_gradient_function,
    register_jvp_function,
)
from amanda_driver_tf.tensorflow_internals.versions import VERSIONS
from amanda_driver_tf.threads import STATE, joins

__all__ = ["PATCHES"]

_SIMPLE = (bool, int, float, str, bytes, list, tuple)
_EagerTensor = ops.EagerTensor
# How many recorded executions of an op get a `Taped`, so that its gradient is analysed.
_WAITED = 2
# The maximum number of ops that fell back; ops may be nested while arguments are converted.
_MOST_FALLBACKS = 8


class _Patches(Patches):
    """All replacements, installed for the first session and undone after the last."""

    def __init__(self) -> None:
        super().__init__()
        #: The replacement of `execute.execute`.
        self.execute: Any = None

    def install(self) -> None:
        found = problems()
        if found:
            raise UnsupportedError(
                f"The eager mode does not know this TensorFlow: {'; '.join(found)}",
                fix=VERSIONS.install_tried,
            )
        ORIGINALS.find()
        # A missing attribute would go through `Tensor.__getattr__`, which is slow.
        self.replace(_EagerTensor, "_amanda_source", None)
        self.afterwards(TOKENS.release)
        # Undone in reverse order: the functions are registered again after the attributes.
        self.afterwards(_register)
        fast, self.execute, gradient_function = _replacements()
        for entry_point, replacement in (
            (FAST_PATH, fast),
            (EXECUTE, self.execute),
            (MUST_RECORD_GRADIENT, _must_record(MUST_RECORD_GRADIENT.current)),
            (GRADIENT_FUNCTION, gradient_function),
            (JVP, backward.jvp),
            (RECORD_OPERATION, backward.record_operation),
            (STOP_RECORDING, recompute.stop_recording),
            (IMPERATIVE_GRAD, backward.differentiating(IMPERATIVE_GRAD.current)),
            (WATCH, _watch(WATCH.current)),
            (ADD_OP_CALLBACK, _exchanging(ADD_OP_CALLBACK.current)),
            (REMOVE_OP_CALLBACK, _exchanging(REMOVE_OP_CALLBACK.current)),
        ):
            self.replace(*entry_point, replacement)
        _register()
        keras_calls.replace(self)
        replicas.replace(self)
        WRITING.replace(self)


def _exchanging(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a function that exchanges `execute.execute`, so that it exchanges TensorFlow's own.

    The replacements are made again over what it has set, which is also what stays after them.
    """

    @functools.wraps(original)
    def run(op_callback: Any) -> None:
        with PATCHES.lock:
            if EXECUTE.current is not PATCHES.execute:
                return original(op_callback)
            PATCHES.restore()
            try:
                return original(op_callback)
            finally:
                PATCHES.install()

    return run


def _register() -> None:
    # The current function, ours or not, since others may have replaced it after us.
    register_gradient_function(GRADIENT_FUNCTION.current)
    register_jvp_function(JVP.current)


PATCHES = _Patches()


# Ops.


def _replacements() -> tuple[Any, Any, Any]:
    """Return the replacements of `TFE_Py_FastPathExecute`, `execute.execute` and
    `_gradient_function`.

    They are in C, or the two below and the one in `backward`.
    """
    if INTERCEPTORS.choice().name != "native":
        return fast_path, execute_op, backward.gradient_function
    interceptor = extension.native.Interceptor(
        fast_path=ORIGINALS.fast_path,
        execute=ORIGINALS.execute,
        slow_fast_path=fast_path,
        slow_execute=execute_op,
        gradient_function=ORIGINALS.gradient_function,
        slow_gradient_function=backward.gradient_function,
        fell_back=_fell_back,
        fallback=FallbackException,
        module=execute,
        no_tape=no_tape,
        recorded=is_recorded,
        pair=PAIR,
        op_type_of=op_type_of,
        handle_of=variable_handle,
        state=STATE,
        thread=THREAD,
        tensor=_EagerTensor,
        call_site=extension.native.CallSite,
        place=Place,
        forward=Forward,
        activation=Activation,
        scope=Scope,
        record=Record,
        op_type=OpType,
        control=Control,
    )
    return interceptor.fast_path, interceptor.execute, interceptor.gradient_function


def fast_path(ctx: Any, op_name: str, name: str | None, *args: Any) -> Any:
    """Replace `TFE_Py_FastPathExecute`, which every op calls first."""
    place = STATE.eager
    if place is not None and place.session.closed and not STATE.running:
        place = STATE.eager = None  # Another thread has removed the tools.
        STATE.unattached = True
    if place is None and joins(op_name):
        place = STATE.eager
    if place is None or STATE.quiet or THREAD.control.routine_depth or not place.control.enabled:
        return ORIGINALS.fast_path(ctx, op_name, name, *args)
    op_type = op_type_of(op_name)
    try:
        found = place.locate(op_type, args)
    except Exception as error:
        _report_failure(place, error, op_type)
        found = None
    if found is None:
        return ORIGINALS.fast_path(ctx, op_name, name, *args)
    session = place.session
    epoch = session.epoch
    if found.idle == epoch and place.control.caching:
        pair = _pair(op_type, found, args, epoch) if session.wants_backward else ()
        if pair is not None:
            kind = op_type.kind
            if kind <= READ and not found.marks:
                try:
                    result = ORIGINALS.fast_path(ctx, op_name, name, *args, *pair)
                except FallbackException:
                    _store_fallback(place, op_type, sys._getframe(1), found, args, idle=True)
                    raise
                if kind == READ and not found.backward:
                    result._amanda_source = found.token
                return result
            if kind != PASS or type(args[0]) is _EagerTensor:
                return _tagged(op_type, found, sys._getframe(1), ctx, name, args, pair)
    if _disagree(place, op_type, args):  # It raises another error than the conversion of `execute`.
        return ORIGINALS.fast_path(ctx, op_name, name, *args)
    _store_fallback(place, op_type, sys._getframe(1), found, args)
    raise FallbackException("to be executed by execute.execute")


def _pair(
    op_type: OpType, found: Record, args: Sequence[Any], epoch: int
) -> tuple[Any, ...] | None:
    """Return what the tape gets with an op without actions whose gradient tools may want; None if
    it needs a `Taped`.
    """
    if found.settled == epoch:
        return PAIR, found
    if no_tape():
        return ()
    return (PAIR, found) if _may_wait(op_type, found, args, epoch) else None


def _disagree(place: Place, op_type: OpType, args: Sequence[Any]) -> bool:
    """Return True if arguments of an op disagree about their dtype."""
    try:
        return bool(op_type.disagree(args))
    except Exception as error:
        _report_failure(place, error, op_type)
        return True


def _report_failure(place: Place, error: Exception, op_type: OpType) -> None:
    """Raise an error of the driver at an op, or list it so that the op can run plainly."""
    place.session.failures.report(error, "tensorflow", op_type.name)


def _may_wait(op_type: OpType, found: Record, args: Sequence[Any], epoch: int) -> bool:
    """Return True if an op with an unknown gradient needs no `Taped`, only a gradient function.

    A gradient function cannot warn if `apply` ends before the gradient is computed. So this is not
    done if the gradient has actions, nor in the first executions.
    """
    if not _is_any_recorded(op_type, args):
        return True
    found.waited += 1
    return found.waited > _WAITED and not any(
        child.planned == epoch for child in found.children.values()
    )


def _is_any_recorded(op_type: OpType, args: Sequence[Any]) -> bool:
    tensors = []
    for value in args[: op_type.count]:
        if type(value) is _EagerTensor:
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += (item for item in value if type(item) is _EagerTensor)
            if any(_is_variable(item) for item in value):
                return True
        elif _is_variable(value):
            return True
    return bool(is_recorded(tensors))


def _is_variable(value: Any) -> bool:
    return not isinstance(value, _SIMPLE) and variable_handle(value) is not None


def _tagged(
    op_type: OpType,
    found: Record,
    frame: FrameType,
    ctx: Any,
    name: str | None,
    args: tuple[Any, ...],
    pair: tuple[Any, ...],
) -> Any:
    place = STATE.eager
    try:
        if op_type.kind == OPAQUE:
            STATE.eager = None
        result = ORIGINALS.fast_path(ctx, op_type.name, name, *args, *pair)
        STATE.eager = place
    except BaseException as error:
        STATE.eager = place
        if isinstance(error, FallbackException):
            _store_fallback(place, op_type, frame, found, args, idle=True)
        raise
    if op_type.kind or found.marks:
        tag(found, args[0] if args else None, result)
    return result


def _store_fallback(
    place: Place,
    op_type: OpType,
    frame: FrameType,
    found: Record,
    args: Sequence[Any],
    idle: bool = False,
) -> None:
    """Store the op for the call of `execute_op` that follows."""
    if execute.execute is not PATCHES.execute:
        raise UnsupportedError(
            "Operators cannot be instrumented: something replaced TensorFlow's execute.execute "
            "after the tools were applied",
            where=op_type.name,
            fix="Replace it outside `apply`",
        )
    fallbacks = STATE.fallbacks
    stored: Record | None = found
    plain: tuple[bool, ...] = ()
    try:
        if op_type.kind == READ and fallbacks:
            consumer = fallbacks[-1][2]
            if consumer is not None and found not in consumer.reads:
                consumer.reads = (*consumer.reads, found)
        if not idle:
            # Only whether arguments are constants, so that no tensor is kept alive.
            plain = tuple(is_plain(value) for value in args[: op_type.count])
    except Exception as error:
        _report_failure(place, error, op_type)
        stored = None
    if len(fallbacks) >= _MOST_FALLBACKS:
        del fallbacks[0]
    fallbacks.append((op_type.name, id(frame), stored, plain))


def _fell_back(op_type: OpType, found: Record) -> None:
    """Store an op without actions for the call of `execute_op` that follows; called from C."""
    _store_fallback(STATE.eager, op_type, sys._getframe(1), found, (), idle=True)


def _take_fallback(
    op_name: str, caller: FrameType
) -> tuple[Record | None, tuple[bool, ...]] | None:
    """Return the record that was stored, which is None if the driver failed then."""
    fallbacks = STATE.fallbacks
    wrapper = id(caller.f_back)
    for index in range(len(fallbacks) - 1, -1, -1):
        name, frame, found, plain = fallbacks[index]
        if frame == wrapper and name == op_name:
            del fallbacks[index:]
            return found, plain
    return None


def execute_op(
    op_name: Any, num_outputs: int, inputs: Any, attrs: Any, ctx: Any, name: str | None = None
) -> Any:
    """Replace `execute.execute`, to which ops fall back, and which also runs functions."""
    place = STATE.eager
    STATE.is_recorded = False
    if (
        place is None
        or type(op_name) is not bytes
        or STATE.quiet
        or THREAD.control.routine_depth
        or not place.control.enabled
    ):
        return ORIGINALS.execute(op_name, num_outputs, inputs, attrs, ctx, name)
    decoded = op_name.decode()
    caller = sys._getframe(1)
    taken = _take_fallback(decoded, caller)
    if taken is not None:
        found, plain = taken
    else:
        op_type, plain = op_type_of(decoded), ()
        try:
            found = place.locate(op_type, inputs)
        except Exception as error:
            _report_failure(place, error, op_type)
            found = None
    if found is None:
        return ORIGINALS.execute(op_name, num_outputs, inputs, attrs, ctx, name)
    session = place.session
    if found.idle == session.epoch and place.control.caching:
        alone = not session.wants_backward or no_tape()
        idle = alone or found.settled == session.epoch or not is_recorded(inputs)
    else:
        alone = idle = False
    if idle:
        outputs = ORIGINALS.execute(op_name, num_outputs, inputs, attrs, ctx, name)
        if outputs and (found.op_type.kind or found.marks):
            tag(found, inputs[0] if inputs else None, outputs[0])
        if not alone and _asks_to_record(caller):
            record_gradient(decoded, inputs, (*(attrs or ()), PAIR, found), outputs)
            STATE.is_recorded = True
        return outputs
    asks_to_record = _asks_to_record(caller)
    call = Call(decoded, num_outputs, inputs, attrs, ctx, name)
    outputs = run(place, found, call, plain, asks_to_record)
    STATE.is_recorded = asks_to_record and bool(outputs)
    return outputs


def _asks_to_record(caller: FrameType) -> bool:
    """Return True if the caller will ask whether to record the op."""
    return "must_record_gradient" in caller.f_code.co_names


def _must_record(original: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(original)
    def must_record_gradient() -> bool:
        if STATE.is_recorded:
            STATE.is_recorded = False  # The op was recorded when it ran.
            return False
        return original()

    return must_record_gradient


# Tapes.


def _watch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watch(tape: Any, tensor: Any) -> None:
        place: Place | None = STATE.eager
        if (
            isinstance(place, Forward)
            and type(tensor) is _EagerTensor
            and tensor._amanda_source is None
        ):
            # A watched tensor that is not the first operand is a weight, kept as a plain tensor.
            tensor._amanda_source = -TOKENS.of(tensor)
        original(tape, tensor)

    return watch
