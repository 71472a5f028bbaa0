"""The doors: the functions of MindSpore through which the operators of a program pass.

All are above autograd, and can be replaced from Python. Which operators pass through which door
depends on the interface that a program uses, and on whether an operator is a generated one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from mindspore import _c_expression, nn
from mindspore.common._tensor_cpp_method import tensor_cpp_methods
from mindspore.common.recompute import _RecomputeHandle
from mindspore.graph import api, jit_trace
from mindspore.ops.auto_generate import gen_ops_prim
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func

__all__ = ["BOUNDARIES", "CELL_CALL", "Door", "doors", "names_of"]

#: Modules with functions ``pyboost_*(primitive, arguments)``, which they have bound by name.
_PYBOOST = (
    "mindspore.ops.auto_generate.gen_ops_prim",
    "mindspore.ops.operations._inner_ops",
    "mindspore.ops.operations.custom_ops",
    "mindspore.ops.operations.manually_defined.ops_def",
    "mindspore.ops.operations.nn_ops",
)
#: Endings of the C++ classes of operators -> how their objects are called.
_CLASSES = {"Prim_": "primitive", "Functional_": "functional"}
#: Methods of tensors in C++ that are operators. `new_zeros` and the like call others.
_METHODS = ("__getitem__", "__setitem__", *tensor_cpp_methods)
#: Code at which the call of a cell begins.
CELL_CALL = nn.Cell.__call__.__code__
#: Name -> the object and the attribute of functions around operators.
BOUNDARIES: dict[str, tuple[Any, str]] = {
    "call": (nn.Cell, "__call__"),
    "run_compiled": (api._JitExecutor, "__call__"),
    "is_tracing": (jit_trace, "jit_context"),
    "backward": (api._PyNativeExecutor, "grad"),
    "recompute": (_RecomputeHandle, "recompute"),
    "recomputing": (api._PyNativeExecutor, "set_is_run_recompute"),
    "record": (base, "_pynative_func_grad_forward"),
    "record_product": (grad_func, "_pynative_func_grad_forward"),
}


class Door(NamedTuple):
    """A function that runs operators.

    Attributes:
        owner: The module or class that holds it.
        name: The attribute.
        form: How it is called: ``pyboost``, ``run_op``, ``primitive``, ``functional`` or
            ``method``, which are methods of `MindsporeAttachment`.
        op_type: The operator that it runs, if it is one.
    """

    owner: Any
    name: str
    form: str
    op_type: str = ""


@functools.cache
def doors() -> tuple[Door, ...]:
    """Return the doors of this release."""
    return tuple(_found())


def _found() -> Iterator[Door]:
    for module in map(importlib.import_module, _PYBOOST):
        for name in [name for name in vars(module) if name.startswith("pyboost_")]:
            yield Door(module, name, "pyboost")
    yield Door(api._PyNativeExecutor, "run_op_async", "run_op")
    for name, kind in vars(_c_expression).items():
        ending = next((end for end in _CLASSES if name.endswith(end) and name != end), None)
        if ending is not None and isinstance(kind, type) and "__call__" in vars(kind):
            yield Door(kind, "__call__", _CLASSES[ending], name.removesuffix(ending).rstrip("_"))
    for name in _METHODS:
        if name in vars(_c_expression.TensorPy):
            yield Door(_c_expression.TensorPy, name, "method", name)


@functools.cache
def names_of(op_type: str) -> tuple[str, ...]:
    """Return the names of the arguments of a generated operator: its operands, then its options."""
    kind = getattr(gen_ops_prim, op_type, None)
    if not isinstance(kind, type):
        return ()
    parts = (
        inspect.signature(vars(kind)[name])
        for name in ("__call__", "__init__")
        if name in vars(kind)
    )
    return tuple(name for part in parts for name in part.parameters if name != "self")
