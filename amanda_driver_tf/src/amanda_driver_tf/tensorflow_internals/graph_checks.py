"""Checks that everything the graph modes depend on exists.

Written for 2.21. Whatever another release lacks is reported by name before anything is replaced.
"""

from __future__ import annotations

import importlib
import inspect

from amanda_driver_tf.tensorflow_internals.entry_points import PARTIAL_RUN_SETUP
from amanda_driver_tf.tensorflow_internals.modules import custom_gradient
from amanda_driver_tf.tensorflow_internals.names import ENDS_OF_RECOMPUTATION, SETUP_OF_PARTIAL_RUN
from amanda_driver_tf.tensorflow_internals.nested_code import nested_codes

__all__ = ["problems"]

# Module -> attributes that are replaced or called; after a colon, their leading arguments.
_SYMBOLS = {
    "tensorflow.core.function.polymorphism.function_type": (
        "from_structured_signature: input_signature output_signature",
    ),
    "tensorflow.python.client.session": (
        "BaseSession._call_tf_sessionrun: self options feed_dict fetch_list target_list",
        "BaseSession._call_tf_sessionprun: self handle feed_dict fetch_list",
        "BaseSession._do_call: self fn",
        "BaseSession._extend_graph",
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator": (
        "ClusterCoordinator.schedule: self fn",
    ),
    "tensorflow.python.distribute.mirrored_run": (
        "_MirroredReplicaContext._merge_call: self fn args kwargs",
        "_MirroredReplicaThread.run: self",
    ),
    "tensorflow.python.eager.backprop": (
        "_gradient_function: op_name attr_tuple num_inputs inputs outputs out_grads",
    ),
    "tensorflow.python.eager.context": (
        "Context.call_function: self name tensor_inputs num_outputs",
        "Context.add_function_def",
        "Context.get_function_def",
        "Context.remove_function",
        "async_clear_error",
        "async_wait",
        "is_async",
    ),
    "tensorflow.python.eager.execute": ("record_gradient: op_name inputs attrs outputs",),
    "tensorflow.python.eager.imperative_grad": ("imperative_grad: tape target sources",),
    "tensorflow.python.eager.record": (
        "record_operation: op_type output_tensors input_tensors backward_function",
        "record_operation_backprop_only",
        "stop_recording",
    ),
    "tensorflow.python.eager.polymorphic_function.atomic_function": (
        "AtomicFunction: name bound_context function_type children",
        "from_func_graph: name graph attrs",
        "make_call_op_in_graph: atomic tensor_inputs context_call_attrs",
    ),
    "tensorflow.python.eager.polymorphic_function.concrete_function": (
        "ConcreteFunction._select_forward_and_backward_functions: self args",
    ),
    "tensorflow.python.framework.function_def_to_graph": ("function_def_to_graph: fdef",),
    "tensorflow.python.framework.op_def_registry": ("get",),
    "tensorflow.python.framework.ops": (
        "Graph._as_graph_def",
        "Graph._create_op_internal: self op_type inputs dtypes",
        "Graph._get_operation_by_tf_operation",
        "Graph._unsafe_unfinalize",
        "Graph.num_operations",
        "Operation._add_control_inputs",
        "tensor_id",
    ),
    "tensorflow.python.ops.control_flow_ops": ("WhileContext.GetControlPivot",),
    "tensorflow.python.ops.control_flow_util": ("GetOutputContext: op",),
    "tensorflow.python.ops.gradients_util": (
        "_AggregatedGrads: grads op",
        "_GradientsHelper: ys xs",
        "_LogOpGradients: op out_grads in_grads",
        "_MaybeCompile: scope op func grad_fn",
    ),
    "tensorflow.python.ops.script_ops": ("EagerFunc", "_py_funcs"),
    "tensorflow.python.pywrap_tfe": (
        "TFE_Py_RegisterGradientFunction",
        "TFE_Py_TapeSetIsStopped",
        "TFE_Py_TapeSetRestartOnThread",
        "TFE_Py_TapeSetStopOnThread",
    ),
}


def problems() -> list[str]:
    """Return what this TensorFlow lacks; empty if the graph modes can work."""
    found = []
    for module, symbols in _SYMBOLS.items():
        for symbol in symbols:
            path, _, arguments = symbol.partition(": ")
            try:
                value: object = importlib.import_module(module)
                for name in path.split("."):
                    value = getattr(value, name)
                if arguments:
                    there = list(inspect.signature(value).parameters)  # type: ignore[arg-type]
                    wanted = arguments.split()
                    if there[: len(wanted)] != wanted:
                        found.append(f"{module}.{path} takes {', '.join(there)}")
            except (ImportError, AttributeError):
                found.append(f"{module}.{path} is missing")
    inside = nested_codes(custom_gradient.recompute_grad)
    missing = [name for name in ENDS_OF_RECOMPUTATION if name not in inside]
    if SETUP_OF_PARTIAL_RUN not in nested_codes(inspect.unwrap(PARTIAL_RUN_SETUP.current)):
        found.append(f"Session.partial_run_setup has no {SETUP_OF_PARTIAL_RUN} inside")
    return found + [f"tf.recompute_grad has no {name} inside" for name in missing]
