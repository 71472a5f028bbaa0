"""Functions and methods of TensorFlow that are replaced while tools are active."""

from __future__ import annotations

from typing import Any, NamedTuple

from amanda_driver_tf.tensorflow_internals.modules import (
    atomic_function,
    backprop,
    cluster_coordinator,
    concrete_function,
    context,
    execute,
    forwardprop,
    gradients_util,
    imperative_grad,
    mirrored_run,
    op_callbacks,
    pywrap_tfe,
    record,
    session,
    tape,
)

__all__ = [
    "ADD_OP_CALLBACK",
    "AGGREGATED_GRADIENTS",
    "CALL_FUNCTION",
    "CALL_IN_GRAPH",
    "DO_CALL",
    "EXECUTE",
    "FAST_PATH",
    "GRADIENTS_HELPER",
    "GRADIENT_FUNCTION",
    "IMPERATIVE_GRAD",
    "JVP",
    "LOG_OP_GRADIENTS",
    "MAYBE_COMPILE",
    "MUST_RECORD_GRADIENT",
    "NEW_ATOMIC_FUNCTION",
    "PARTIAL_RUN_SETUP",
    "RECORD_BACKPROP_ONLY",
    "RECORD_GRADIENT",
    "RECORD_OPERATION",
    "REMOVE_OP_CALLBACK",
    "REPLICA_MERGE_CALL",
    "REPLICA_THREAD_RUN",
    "REPLICA_THREAD_START",
    "SCHEDULE",
    "SELECT_FUNCTIONS",
    "SESSION_PARTIAL_RUN",
    "SESSION_RUN",
    "STOP_RECORDING",
    "WATCH",
    "EntryPoint",
]


class EntryPoint(NamedTuple):
    """An attribute, given by the module or class that has it and its name."""

    owner: Any
    name: str

    @property
    def current(self) -> Any:
        """The present value of the attribute."""
        return getattr(self.owner, self.name)


# Eager operators. Every op calls the first one, which may fall back to the second.
FAST_PATH = EntryPoint(pywrap_tfe, "TFE_Py_FastPathExecute")
EXECUTE = EntryPoint(execute, "execute")
# These exchange the second one.
ADD_OP_CALLBACK = EntryPoint(op_callbacks, "add_op_callback")
REMOVE_OP_CALLBACK = EntryPoint(op_callbacks, "remove_op_callback")

# Tapes.
MUST_RECORD_GRADIENT = EntryPoint(execute, "must_record_gradient")
RECORD_GRADIENT = EntryPoint(execute, "record_gradient")
RECORD_BACKPROP_ONLY = EntryPoint(record, "record_operation_backprop_only")
RECORD_OPERATION = EntryPoint(record, "record_operation")
STOP_RECORDING = EntryPoint(record, "stop_recording")
IMPERATIVE_GRAD = EntryPoint(imperative_grad, "imperative_grad")
WATCH = EntryPoint(tape, "watch")
#: Called by tapes for the gradient of an op, and by forward accumulators for its tangents.
GRADIENT_FUNCTION = EntryPoint(backprop, "_gradient_function")
JVP = EntryPoint(forwardprop, "_jvp_dispatch")

# `tf.gradients`, which also builds the backward functions of tf.functions.
GRADIENTS_HELPER = EntryPoint(gradients_util, "_GradientsHelper")
AGGREGATED_GRADIENTS = EntryPoint(gradients_util, "_AggregatedGrads")
MAYBE_COMPILE = EntryPoint(gradients_util, "_MaybeCompile")
LOG_OP_GRADIENTS = EntryPoint(gradients_util, "_LogOpGradients")
NEW_ATOMIC_FUNCTION = EntryPoint(atomic_function, "from_func_graph")

# Functions.
CALL_FUNCTION = EntryPoint(context.Context, "call_function")
#: The same where a graph is built.
CALL_IN_GRAPH = EntryPoint(atomic_function, "make_call_op_in_graph")
#: Returns the forward and backward function for a call of a ConcreteFunction.
SELECT_FUNCTIONS = EntryPoint(
    concrete_function.ConcreteFunction, "_select_forward_and_backward_functions"
)

# Sessions.
SESSION_RUN = EntryPoint(session.BaseSession, "_call_tf_sessionrun")
SESSION_PARTIAL_RUN = EntryPoint(session.BaseSession, "_call_tf_sessionprun")
DO_CALL = EntryPoint(session.BaseSession, "_do_call")
PARTIAL_RUN_SETUP = EntryPoint(session.BaseSession, "partial_run_setup")

# Strategies.
REPLICA_THREAD_START = EntryPoint(mirrored_run._MirroredReplicaThread, "__init__")
REPLICA_THREAD_RUN = EntryPoint(mirrored_run._MirroredReplicaThread, "run")
REPLICA_MERGE_CALL = EntryPoint(mirrored_run._MirroredReplicaContext, "_merge_call")
SCHEDULE = EntryPoint(cluster_coordinator.ClusterCoordinator, "schedule")
