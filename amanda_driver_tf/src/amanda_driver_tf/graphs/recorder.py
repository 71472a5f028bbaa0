"""The recorder: observes TensorFlow differentiating graphs, and stores `Records` on them.

Owns the wrappers around TensorFlow's two ways to differentiate a graph (`tf.gradients`, and tapes
inside functions), and around the creation of functions. The wrappers stay installed, since a
function that is traced outside of `apply` may run inside of it. They do not change what is built.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.function_graphs import name_graph
from amanda_driver_tf.graphs.layer_calls import record_layers
from amanda_driver_tf.graphs.records import Record, Records, Run, is_symbolic, next_id
from amanda_driver_tf.tensorflow_internals.entry_points import (
    AGGREGATED_GRADIENTS,
    GRADIENT_FUNCTION,
    GRADIENTS_HELPER,
    IMPERATIVE_GRAD,
    LOG_OP_GRADIENTS,
    MAYBE_COMPILE,
    NEW_ATOMIC_FUNCTION,
    RECORD_GRADIENT,
    RECORD_OPERATION,
)
from amanda_driver_tf.tensorflow_internals.graph_checks import problems
from amanda_driver_tf.tensorflow_internals.modules import context, ops, tensor as tensor_lib
from amanda_driver_tf.tensorflow_internals.objects import tensor_of_source
from amanda_driver_tf.tensorflow_internals.tapes import register_gradient_function
from amanda_driver_tf.tensorflow_internals.versions import VERSIONS

__all__ = ["WRAPPED", "install", "is_installed"]

_MARK = "_amanda_op"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = []
        #: The output gradients that were aggregated last: op, list, copy of the list.
        self.collected: tuple[Any, list[Any], list[Any]] | None = None


_THREAD = _Thread()
#: Names of the wrapped functions; empty until the recorder is installed.
WRAPPED: list[str] = []


def is_installed() -> bool:
    """Return True if the recorder is installed."""
    return bool(WRAPPED)


def install() -> None:
    """Install the recorder for the rest of the process; a second call does nothing."""
    if WRAPPED:
        return
    missing = problems()
    if missing:
        raise UnsupportedError(
            f"This TensorFlow is not known: {'; '.join(missing)}", fix=VERSIONS.install_tried
        )
    for entry_point, wrap in (
        (GRADIENTS_HELPER, _run_of_gradients),
        (AGGREGATED_GRADIENTS, _collecting),
        (MAYBE_COMPILE, _recording),
        (LOG_OP_GRADIENTS, _completing),
        (IMPERATIVE_GRAD, _run_of_tape),
        (RECORD_GRADIENT, _marking),
        (GRADIENT_FUNCTION, _of_tape),
        (RECORD_OPERATION, _wrapping),
        (NEW_ATOMIC_FUNCTION, _naming),
    ):
        setattr(*entry_point, wrap(entry_point.current))
        WRAPPED.append(entry_point.name)
    register_gradient_function(GRADIENT_FUNCTION.current)
    record_layers()


def _flat(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _note(
    forward: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    out_grads: Sequence[Any],
    missing: frozenset[int],
    compute: Callable[[], Any],
) -> Any:
    graph = ops.get_default_graph()
    start = next_id(graph)
    result = compute()
    run = _THREAD.runs[-1] if _THREAD.runs else None
    extent = (start, next_id(graph))
    Records.made(graph).add(
        Record(forward, inputs, outputs, out_grads, missing, _flat(result), extent, run)
    )
    return result


# tf.gradients, which also builds the backward functions of tf.functions.


def _run_of_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gradients(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        sources = [tensor_of_source(x) for x in _flat(xs)]
        return _in_run(_flat(ys), sources, lambda: original(ys, xs, *args, **kwargs))

    return gradients


def _in_run(targets: Sequence[Any], sources: Sequence[Any], compute: Callable[[], Any]) -> Any:
    run = Run(targets, sources, _THREAD.runs[-1] if _THREAD.runs else None)
    graph = ops.get_default_graph()
    run.start = next_id(graph)
    _THREAD.runs.append(run)
    try:
        results = compute()
        _record_unpropagated()
    finally:
        _THREAD.runs.pop()
        _THREAD.collected = None  # Otherwise it would keep the graph alive.
    run.results = tuple(_flat(results))
    run.stop = next_id(graph)
    found = Records.made(graph)
    found.runs.append(run)
    for outer, inner in getattr(graph, "captures", ()):
        # Stored now, since branches forget their captures once they are built.
        found.captured.setdefault((id(inner.op), inner.value_index), outer)
    return results


def _collecting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def aggregated(grads: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        _record_unpropagated()
        collected = original(grads, op, *args, **kwargs)
        # The caller fills this very list with zeros.
        _THREAD.collected = (op, collected, list(collected))
        return collected

    return aggregated


def _record_unpropagated() -> None:
    """Record an op whose output gradients were aggregated, but not propagated any further."""
    collected, _THREAD.collected = _THREAD.collected, None
    if collected is None or not _THREAD.runs:
        return
    op, _, found = collected
    missing = frozenset(i for i, gradient in enumerate(found) if _is_missing(gradient))
    # An op that has a gradient function may simply be a source of the differentiation.
    if op.inputs and len(missing) < len(found) and not _has_gradient(op):
        graph = ops.get_default_graph()
        extent, none = (next_id(graph), next_id(graph)), [None] * len(op.inputs)
        Records.made(graph).unpropagated.append(
            Record(op, op.inputs, op.outputs, found, missing, none, extent, _THREAD.runs[-1])
        )


def _has_gradient(op: Any) -> bool:
    try:
        return ops.get_gradient_function(op) is not None
    except LookupError:
        return True  # The call of a function is differentiated through that function.


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def differentiate(scope: Any, op: Any, func: Any, grad_fn: Any) -> Any:
        collected = _THREAD.collected
        if collected is None or collected[0] is not op:
            return original(scope, op, func, grad_fn)
        _, filled, found = collected
        _THREAD.collected = None
        missing = frozenset(i for i, gradient in enumerate(found) if _is_missing(gradient))
        return _note(
            op,
            op.inputs,
            op.outputs,
            filled,
            missing,
            lambda: original(scope, op, func, grad_fn),
        )

    return differentiate


def _completing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Update the record of gated gradients, which replace those of the gradient function."""

    @functools.wraps(original)
    def log(op: Any, out_grads: Any, in_grads: Any) -> Any:
        found = Records.made(ops.get_default_graph()).records
        if found and found[-1].forward is op:
            found[-1].in_grads = tuple(in_grads)
            found[-1].stop = next_id(ops.get_default_graph())
        return original(op, out_grads, in_grads)

    return log


def _is_missing(gradient: Any) -> bool:
    return gradient is None or (isinstance(gradient, list) and not gradient)


# Tapes inside functions.


def _run_of_tape(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def imperative_grad(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if context.executing_eagerly():
            return original(tape, target, sources, *args, **kwargs)
        run = lambda: original(tape, target, sources, *args, **kwargs)  # noqa: E731
        return _in_run(_flat(target), sources, run)

    return imperative_grad


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def record_gradient(op_name: Any, inputs: Any, attrs: Any, outputs: Any) -> Any:
        if outputs and isinstance(outputs[0], tensor_lib.Tensor) and hasattr(outputs[0], "graph"):
            first = outputs[0]
            if not isinstance(first, ops.EagerTensor):
                # The tape may pass neither inputs nor outputs of the op to its gradient function.
                attrs = (*attrs, _MARK, first.op)
        return original(op_name, inputs, attrs, outputs)

    return record_gradient


def _of_tape(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gradient_function(op_name: Any, attrs: Any, *call: Any) -> Any:
        if not attrs or len(attrs) < 2 or attrs[-2] != _MARK:
            return original(op_name, attrs, *call)
        op = attrs[-1]
        _, _, _, out_grads, *_ = call
        missing = frozenset(i for i, gradient in enumerate(out_grads) if gradient is None)
        compute = lambda: original(op_name, attrs[:-2], *call)  # noqa: E731
        return _note(op, op.inputs, op.outputs, out_grads, missing, compute)

    return gradient_function


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the recording of ops that bring their own gradient: calls, custom gradients, reads."""

    @functools.wraps(original)
    def record_operation(
        op_type: Any,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Any,
        forward_function: Any = None,
    ) -> Any:
        first = output_tensors[0] if output_tensors else None
        # A captured value and its placeholder count as one tensor.
        if op_type != "captured_value" and first is not None and is_symbolic(first):
            forward, inputs, outputs = first.op, tuple(input_tensors), tuple(output_tensors)
            compute = backward_function

            def backward_function(*out_grads: Any) -> Any:
                if context.executing_eagerly():
                    return compute(*out_grads)
                missing = frozenset(i for i, g in enumerate(out_grads) if g is None)
                return _note(
                    forward, inputs, outputs, out_grads, missing, lambda: compute(*out_grads)
                )

        return original(op_type, output_tensors, input_tensors, backward_function, forward_function)

    return record_operation


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_func_graph(name: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(name, graph, *args, **kwargs)
        name_graph(function.name.decode(), graph)
        return function

    return from_func_graph
