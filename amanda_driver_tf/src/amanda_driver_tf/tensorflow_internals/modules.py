"""The modules of `tensorflow.python` that this driver uses, and one of `tensorflow.core`."""

from __future__ import annotations

from tensorflow.core.function.polymorphism import function_type
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import session
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import (
    backprop,
    context,
    core,
    execute,
    forwardprop,
    forwardprop_util,
    imperative_grad,
    record,
    tape,
)
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function
from tensorflow.python.framework import (
    config,
    dtypes,
    errors,
    func_graph,
    function_def_to_graph,
    importer,
    indexed_slices,
    kernels,
    op_callbacks,
    op_def_registry,
    ops,
    tensor,
    tensor_shape,
    tensor_util,
)
from tensorflow.python.ops import (
    control_flow_util,
    custom_gradient,
    gen_array_ops,
    gen_math_ops,
    gen_resource_variable_ops,
    gradients_util,
    resource_variable_ops,
    script_ops,
)

__all__ = [
    "atomic_function",
    "backprop",
    "cluster_coordinator",
    "concrete_function",
    "config",
    "context",
    "control_flow_util",
    "core",
    "custom_gradient",
    "dtypes",
    "errors",
    "execute",
    "forwardprop",
    "forwardprop_util",
    "func_graph",
    "function_def_to_graph",
    "function_type",
    "gen_array_ops",
    "gen_math_ops",
    "gen_resource_variable_ops",
    "gradients_util",
    "imperative_grad",
    "importer",
    "indexed_slices",
    "kernels",
    "mirrored_run",
    "op_callbacks",
    "op_def_registry",
    "ops",
    "pywrap_tfe",
    "record",
    "resource_variable_ops",
    "script_ops",
    "session",
    "tape",
    "tensor",
    "tensor_shape",
    "tensor_util",
]
