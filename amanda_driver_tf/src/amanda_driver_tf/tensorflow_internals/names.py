"""Names in definitions of graphs, and of TensorFlow's modules. Does not import TensorFlow."""

from __future__ import annotations

__all__ = [
    "CALLERS_OF_RECOMPUTED",
    "COLOCATION",
    "COMPILED_BY_XLA",
    "CUSTOM_GRADIENT",
    "ENDS_OF_RECOMPUTATION",
    "GATHERED_GRADIENTS",
    "GRADIENT_OP_TYPE",
    "INITIALIZES_VARIABLES",
    "INPUT_SHAPES",
    "JACOBIANS",
    "LAST_MODULE",
    "MODULES_BESIDE_THE_MODEL",
    "MODULES_OF_GRADIENTS",
    "MODULES_PASSED_THROUGH",
    "NOT_INLINED",
    "SETUP_OF_PARTIAL_RUN",
    "SIGNATURE_OPS",
    "ZONES_OF_TENSORFLOW",
]

# Attributes of nodes and functions that TensorFlow adds to those of the operator.

#: The nodes that a node is colocated with.
COLOCATION = "_class"
COMPILED_BY_XLA = "_XlaMustCompile"
NOT_INLINED = "_noinline"
GRADIENT_OP_TYPE = "_gradient_op_type"
INPUT_SHAPES = "_input_shapes"

#: Ops that represent the arguments and results of a function.
SIGNATURE_OPS = frozenset({"_Arg", "_DeviceArg", "_DeviceRetval", "_Retval"})

#: In the name of an op by which `tf.gradients` gathers the gradients of an op.
GATHERED_GRADIENTS = "_grad/tuple/group_deps"

# Nested functions.

#: Inside `Session.partial_run_setup`: calls the C API.
SETUP_OF_PARTIAL_RUN = "_setup_fn"
#: Inside `tf.recompute_grad`: call the user's function in the first and the second run.
CALLERS_OF_RECOMPUTED = ("inner", "inner_recompute_grad")
#: Inside `tf.recompute_grad`: make the last op of the gradient.
ENDS_OF_RECOMPUTATION = ("inner_recompute_grad", "grad_wrapper")

#: Methods of tapes that compute the gradients of all rows.
JACOBIANS = ("jacobian", "batch_jacobian")

# Modules, or prefixes of their names.

#: Imported late by TensorFlow: if it is in sys.modules, TensorFlow can be used.
LAST_MODULE = "tensorflow.python.eager.context"
CUSTOM_GRADIENT = "tensorflow.python.ops.custom_gradient"
MODULES_OF_GRADIENTS = ("tensorflow.python.ops.gradients", "tensorflow.python.eager.backprop")
#: What the dotted name of a function begins with -> the zone of all that it calls.
ZONES_OF_TENSORFLOW = {
    "tensorflow.python.ops.init_ops": "init",
    "tensorflow.python.ops.clip_ops.clip_by_global_norm": "optimizer",
    "tensorflow.python.ops.clip_ops.global_norm": "optimizer",
    "tensorflow.python.data.": "data",
    "tensorflow.python.training.": "optimizer",
    "tensorflow.python.training.saver.": "data",
    # They run or read a program that may be a model.
    "tensorflow.python.training.saver.import_meta_graph": "model",
    "tensorflow.python.training.monitored_session.": "model",
    "tensorflow.python.training.basic_session_run_hooks.": "model",
    # It calls the loss that was passed as a function.
    "tensorflow.python.training.optimizer.compute_gradients": "model",
    "tf_keras.src.optimizers.legacy.optimizer_v2._compute_gradients": "model",
    "tensorflow.python.keras.optimizer": "optimizer",
    "tensorflow.python.keras.metrics": "metrics",
    "tensorflow.python.keras.initializers": "init",
    "tensorflow.python.ops.metrics_impl.": "metrics",
}
#: Of a function, before its first call: look for variables without a value, and set them.
INITIALIZES_VARIABLES = "_initialize_uninitialized_variables"
#: Skipped when a call site is determined: their frames differ between an op's fast path and its
#: fallback, or are below every op (dispatch, conversion, traceback handlers).
MODULES_PASSED_THROUGH = (
    "tensorflow.python.eager.",
    "tensorflow.python.framework.",
    "tensorflow.python.ops.gen_",
    "tensorflow.python.ops.resource_variable_ops",
    "tensorflow.python.ops.weak_tensor_ops",
    "tensorflow.python.profiler.",
    "tensorflow.python.util.",
)
#: Ops that they run do not belong to a model.
MODULES_BESIDE_THE_MODEL = (
    "tensorflow.python.checkpoint.",
    "tensorflow.python.data.",
    "tensorflow.python.saved_model.",
    "tensorflow.python.training.saving.",
    "tensorflow.python.training.saver",
)
