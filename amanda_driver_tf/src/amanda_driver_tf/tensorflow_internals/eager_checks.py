"""Checks that what the eager mode replaces or calls is as this driver expects.

Written for 2.21.0. Nothing stays replaced: only `_tried` replaces functions for a moment.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

from amanda_driver_tf.tensorflow_internals.entry_points import EXECUTE, FAST_PATH
from amanda_driver_tf.tensorflow_internals.modules import (
    backprop,
    context,
    core,
    custom_gradient,
    execute,
    forwardprop,
    gen_math_ops,
    imperative_grad,
    ops,
    pywrap_tfe,
    record,
    resource_variable_ops,
    tape,
)
from amanda_driver_tf.tensorflow_internals.names import CALLERS_OF_RECOMPUTED
from amanda_driver_tf.tensorflow_internals.nested_code import nested_codes
from amanda_driver_tf.tensorflow_internals.tapes import (
    FallbackException,
    executes_eagerly,
    is_initialized,
)

__all__ = ["problems"]

#: Owner -> attributes that are replaced or called.
_NEEDED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        pywrap_tfe,
        (
            "TFE_Py_FastPathExecute",
            "TFE_Py_Execute",
            "TFE_Py_RegisterGradientFunction",
            "TFE_Py_RegisterJVPFunction",
            "TFE_Py_TapeSetIsEmpty",
            "TFE_Py_TapeSetShouldRecordBackprop",
            "TFE_Py_TapeSetRecordOperation",
        ),
    ),
    (execute, ("execute", "quick_execute", "record_gradient", "must_record_gradient")),
    (core, ("_FallbackException",)),
    (context, ("_context", "context")),
    (record, ("record_operation", "stop_recording", "should_record_backprop")),
    (tape, ("watch",)),
    (imperative_grad, ("imperative_grad",)),
    (backprop, ("_gradient_function", "imperative_grad")),
    (forwardprop, ("_jvp_dispatch",)),
    (resource_variable_ops, ("BaseResourceVariable",)),
    (ops, ("EagerTensor", "get_gradient_function")),
)

_SIGNATURES: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (execute, "quick_execute", ("op_name", "num_outputs", "inputs", "attrs", "ctx", "name")),
    (
        backprop,
        "_gradient_function",
        (
            "op_name",
            "attr_tuple",
            "num_inputs",
            "inputs",
            "outputs",
            "out_grads",
            "skip_input_indices",
            "forward_pass_name_scope",
        ),
    ),
    (
        forwardprop,
        "_jvp_dispatch",
        ("op_name", "attr_tuple", "inputs", "outputs", "tangents", "use_batch"),
    ),
    (
        record,
        "record_operation",
        ("op_type", "output_tensors", "input_tensors", "backward_function", "forward_function"),
    ),
    (tape, "watch", ("tape", "tensor")),
)


def problems() -> list[str]:
    """Return what is missing or differs from what this driver expects.

    Must be called while nothing is replaced.
    """
    found = [
        f"{getattr(owner, '__name__', owner)}.{name} is missing"
        for owner, names in _NEEDED
        for name in names
        if not hasattr(owner, name)
    ]
    inside = nested_codes(custom_gradient.recompute_grad)
    found += [
        f"recompute_grad has no {name} inside"
        for name in CALLERS_OF_RECOMPUTED
        if name not in inside
    ]
    for owner, name, wanted in _SIGNATURES:
        function = getattr(owner, name, None)
        if function is None or function.__module__.startswith("amanda_driver_tf."):
            continue  # The recorder's wrapper; the recorder has checked the original.
        have = tuple(inspect.signature(function).parameters)
        if have != wanted:
            found.append(f"{owner.__name__}.{name} takes {have} and not {wanted}")
    # Nothing can be tried while a graph is built, or before the runtime has started: the program
    # may still want to configure its threads and devices.
    return found or (list(_tried()) if is_initialized() and executes_eagerly() else [])


@functools.cache
def _tried() -> tuple[str, ...]:
    """Test with tiny operators what no signature shows."""
    found: list[str] = []
    one = ops.convert_to_tensor(1.0)
    if type(one) is not ops.EagerTensor:
        found.append("a constant is not an EagerTensor")
    if hasattr(ops.EagerTensor, "_amanda_source"):
        found.append("EagerTensor._amanda_source is taken")
    seen: list[Any] = []
    original, fast = EXECUTE.current, FAST_PATH.current
    here = threading.get_ident()

    def fall_back(*args: Any) -> Any:
        if threading.get_ident() != here:
            return fast(*args)
        raise FallbackException("to be executed by execute.execute")

    def note(op_name: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            seen.append(op_name)
        return original(op_name, *args, **kwargs)

    pywrap_tfe.TFE_Py_FastPathExecute, execute.execute = fall_back, note
    try:
        gen_math_ops.neg(one)
    finally:
        pywrap_tfe.TFE_Py_FastPathExecute, execute.execute = fast, original
    if seen != [b"Neg"]:
        found.append(f"an operator that falls back executes {seen}")
    return tuple(found)
