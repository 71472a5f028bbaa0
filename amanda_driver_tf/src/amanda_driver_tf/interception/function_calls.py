"""Interception of calls of TensorFlow functions, and of their records on tapes.

Owns which calls are passed to what instruments their thread, and how the gradient that a tape calls
finds the results that the forward call has saved for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import Patches, local_of
from amanda_driver_tf.graphs.function_graphs import GRAPHS, drop_unrecorded_gradients
from amanda_driver_tf.tensorflow_internals.entry_points import (
    CALL_FUNCTION,
    CALL_IN_GRAPH,
    RECORD_BACKPROP_ONLY,
    RECORD_OPERATION,
    SELECT_FUNCTIONS,
)
from amanda_driver_tf.tensorflow_internals.modules import context, forwardprop_util
from amanda_driver_tf.tensorflow_internals.objects import graph_of_function
from amanda_driver_tf.threads import STATE, call_quietly, joins

__all__ = ["PATCHES"]


class _FunctionCalls(Patches):
    """The functions of TensorFlow that are replaced while any thread is attached."""

    def install(self) -> None:
        for entry_point, make in (
            (CALL_FUNCTION, _calling),
            (CALL_IN_GRAPH, _embedding),
            (SELECT_FUNCTIONS, _differentiating),
            (RECORD_OPERATION, _carrying),
            (RECORD_BACKPROP_ONLY, _carrying),
        ):
            self.replace(*entry_point, make(entry_point.current))


PATCHES = _FunctionCalls()


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_function(self: Any, name: Any, tensor_inputs: Any, num_outputs: Any) -> Any:
        saved = STATE.passed_results
        mode = saved.mode if saved is not None else STATE.functions
        if mode is None and joins("PartitionedCall"):
            mode = STATE.functions
        if STATE.quiet or mode is None:
            return original(self, name, tensor_inputs, num_outputs)
        function = name.decode()
        if function not in GRAPHS:
            # Traced before the recorder was installed; the caller is the AtomicFunction.
            graph = graph_of_function(local_of(sys._getframe(1), "self"))
            if graph is not None:
                GRAPHS[function] = graph

        def call(function: Any, inputs: Any, count: Any) -> Any:
            # The eager mode would see the call as one more op.
            return call_quietly(original, self, function, inputs, count)

        return mode.run(call, name, tensor_inputs, num_outputs, saved)

    return call_function


def _embedding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_in_graph(atomic: Any, tensor_inputs: Any, context_call_attrs: Any) -> Any:
        def call(function: Any, inputs: Any) -> Any:
            return original(function, inputs, context_call_attrs)

        saved = STATE.passed_results
        if saved is None or STATE.quiet:
            return call(atomic, tensor_inputs)
        return saved.mode.embed(call, atomic, tensor_inputs, saved)

    return call_in_graph


def _differentiating(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def select(self: Any, *args: Any, **kwargs: Any) -> Any:
        drop_unrecorded_gradients(self)
        functions = original(self, *args, **kwargs)
        if context.executing_eagerly():
            STATE.tangents = bool(forwardprop_util.pack_tangents(args[0]).tangents)
        return functions

    return select


def _carrying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `record_operation` so that the tape's backward function receives the twin's extra
    outputs.
    """

    @functools.wraps(original)
    def record_operation(
        op_type: Any,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        made, STATE.saved_results = STATE.saved_results, None
        if made is not None and output_tensors and _is_shared(made[0], output_tensors):
            saved, compute = made[1], backward_function

            def backward_function(*gradients: Any) -> Any:
                if not context.executing_eagerly():
                    saved.refuse_in_graph()
                # `apply` may have ended meanwhile; edits of the forward pass are still valid.
                if saved.mode.session.closed and saved.twin.watched:
                    saved.mode.session.warn_once(
                        "Backward ran after `apply` ended: edits made in the forward pass "
                        "stay, backward routines do not run. Call it inside `apply`."
                    )
                user, before = object(), STATE.passed_results
                try:
                    PATCHES.acquire(user)
                    STATE.passed_results = saved
                    result = compute(*gradients)
                    STATE.passed_results = before
                    PATCHES.release(user)
                    return result
                except BaseException:
                    STATE.passed_results = before
                    PATCHES.release(user)
                    raise

        return original(op_type, output_tensors, input_tensors, backward_function, *args, **kwargs)

    return record_operation


def _is_shared(made: Sequence[Any], recorded: Sequence[Any]) -> bool:
    known = {id(tensor) for tensor in made}
    return any(id(tensor) in known for tensor in recorded)
