"""Arrays, operators, the tape and Gluon's blocks: what the driver needs of MXNet's internals."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mxnet
from mxnet import autograd, gluon
from mxnet.base import _LIB, MXCallbackList, NDArrayHandle, c_handle_array, check_call, mx_uint
from mxnet.ndarray import NDArray, register
from mxnet.ndarray.numpy import _api_internal

from amanda_core.driver_kit import inside_routine

#: What the names of backward operators begin with.
BACKWARD = "_backward_"
#: Type of an array's handle, which can be referred to weakly; an array cannot.
HANDLE = NDArrayHandle
#: Code at which the call of a block begins.
BLOCK_CALL = gluon.Block.__call__.__code__
#: Methods that make views in C, without an operator call in Python.
VIEWS = {"reshape": "reshape", "_at": "at", "_slice": "slice"}
#: What a driver has to replace: name -> the object that holds it, and the attribute.
ENTRY_POINTS: Mapping[str, tuple[Any, str]] = {
    "invoke": (register, "_imperative_invoke"),
    "backward": (_LIB, "MXAutogradBackwardEx"),
    "call": (gluon.Block, "__call__"),
    "call_hybridized": (gluon.HybridBlock, "_call_cached_op"),
    "run_graph": (mxnet.nd.CachedOp, "__call__"),
    "step": (gluon.Trainer, "step"),
    "update": (gluon.Trainer, "update"),
    # The operators that are called without `_imperative_invoke`.
    "tensordot": (_api_internal, "tensordot"),
    "zeros": (_api_internal, "zeros"),
    **{op_type: (NDArray, method) for method, op_type in VIEWS.items()},
}


class OpInfo:
    """The name of an operator, and those of its array inputs."""

    __slots__ = ("inputs", "name")

    def __init__(self, name: str, inputs: tuple[str, ...] = ()) -> None:
        self.name, self.inputs = name, inputs


@functools.cache
def op_info(handle: int) -> OpInfo:
    """Return the name and inputs of the operator with this handle, as MXNet registered it."""
    name, description, variable, result = (ctypes.c_char_p() for _ in range(4))
    count = mx_uint()
    names, types, texts = (ctypes.POINTER(ctypes.c_char_p)() for _ in range(3))
    fields = (name, description, count, names, types, texts, variable, result)
    check_call(
        _LIB.MXSymbolGetAtomicSymbolInfo(ctypes.c_void_p(handle), *map(ctypes.byref, fields))
    )
    inputs = [
        names[i].decode() for i in range(count.value) if b"NDArray" in types[i].partition(b",")[0]
    ]
    assert name.value is not None
    return OpInfo(name.value.decode(), tuple(inputs))


# Arrays. A handle stands for its array where a weak reference is needed.


def _handle(value: Any) -> Any:
    return value if isinstance(value, NDArrayHandle) else value.handle


def array_of(handle: Any) -> Any:
    """Return a new array on the memory of a handle's array."""
    copy = NDArrayHandle()
    check_call(_LIB.MXShallowCopyNDArray(handle, ctypes.byref(copy)))
    return NDArray(copy)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the dimensions of an array or a handle's array."""
    return tuple(value.shape if isinstance(value, NDArray) else array_of(value).shape)


def address_of(value: Any) -> int | None:
    """Return the address of the elements of a dense array; None if it has no memory."""
    pointer = ctypes.c_void_p()
    # An array that is being computed may have no memory yet.
    check_call(_LIB.MXNDArrayWaitToRead(_handle(value)))
    check_call(_LIB.MXNDArrayGetData(_handle(value), ctypes.byref(pointer)))
    return pointer.value


def has_gradient_buffer(value: Any) -> bool:
    """Return True if gradients of an array are wanted (`attach_grad`)."""
    found = NDArrayHandle()
    check_call(_LIB.MXNDArrayGetGrad(_handle(value), ctypes.byref(found)))
    if found.value is None:
        return False
    check_call(_LIB.MXNDArrayFree(found))
    return True


def dtype_of(array: NDArray) -> str:
    """Return the name of an array's dtype, which is a type, or a dtype in NumPy's interface."""
    dtype = array.dtype
    return str(getattr(dtype, "__name__", None) or dtype.name).rstrip("_")


def new_array(values: Any, like: NDArray) -> NDArray:
    """Return an array of these values on the device of another one, of the same interface."""
    array = mxnet.np.array if isinstance(like, mxnet.np.ndarray) else mxnet.nd.array
    return array(values, dtype=like.dtype, ctx=like.ctx)


def needs_gradient(array: Any) -> bool:
    """Return True for an array that the tape derives from a variable with a gradient."""
    if not isinstance(array, NDArray) or not dtype_of(array).startswith("float"):
        return False
    found = ctypes.c_void_p()
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(found)) != 0:
        return False
    # Variables are called var0, var1, ...; constants on the tape null0, null1, ...
    symbol = mxnet.symbol.Symbol(mxnet.base.SymbolHandle(found.value))
    return any(name.startswith("var") for name in symbol.list_inputs())


#: What asks a backward program to add to an array, and not to overwrite it.
_ADD = 3
#: Functions that MXNet may call, until it deletes their place on the tape.
_callbacks: dict[int, Any] = {}
_numbers = itertools.count()


def record(
    inputs: Sequence[NDArray],
    outputs: Sequence[NDArray],
    backward: Callable[[list[NDArray]], Sequence[NDArray | None]],
) -> None:
    """Put a function on the tape, if one of its inputs is there.

    `mxnet.autograd.Function` lets gradients be wrong if one of the others is not wanted.

    Args:
        inputs: The arrays that the function got.
        outputs: New arrays, which it made of them.
        backward: Returns the gradients of the inputs for those of the outputs; None for zero. It
            runs on a thread of MXNet, and must not raise.
    """
    is_np = isinstance(outputs[0], mxnet.np.ndarray)

    def run(count: int, _: int, handles: Any, requests: Any, *rest: Any) -> bool:
        every = range(count + len(inputs))
        arrays = [NDArray(ctypes.cast(handles[n], NDArrayHandle)) for n in every]
        given = [array.as_np_ndarray() if is_np else array for array in arrays[:count]]
        gradients = backward(given)
        with inside_routine():  # The driver's own operators.
            for n, gradient in enumerate(gradients):
                if requests[n]:
                    target = arrays[count + n]
                    new = 0 if gradient is None else gradient.as_nd_ndarray().astype(target.dtype)
                    target[:] = target + new if requests[n] == _ADD else new
        return True

    number = next(_numbers)

    def delete(_: Any) -> bool:
        del _callbacks[number]
        return True

    functions = [autograd.Function._bwd_functype(run), autograd.Function._del_functype(delete)]
    plain = ctypes.CFUNCTYPE(ctypes.c_int)
    callbacks = MXCallbackList(
        len(functions),
        (plain * 2)(*(ctypes.cast(function, plain) for function in functions)),
        (ctypes.c_void_p * 2)(),
    )
    _callbacks[number] = callbacks, functions
    arrays = (len(inputs), c_handle_array(inputs), len(outputs), c_handle_array(outputs))
    check_call(_LIB.MXCustomFunctionRecord(*arrays, ctypes.byref(callbacks)))


# Gluon.


def children_of(block: gluon.Block) -> Mapping[str, gluon.Block]:
    """Return the blocks that a block holds, by name."""
    return block._children  # type: ignore[no-any-return]


def parameters_of(block: gluon.Block) -> Iterator[tuple[str, NDArray]]:
    """Yield the parameters of a block itself that have values, by attribute."""
    for name in block._reg_params:
        array = data_of(block, name)
        if array is not None:
            yield name, array


def data_of(block: gluon.Block, name: str) -> NDArray | None:
    """Return the array of a block's parameter; None if it has none yet.

    A parameter that is on several devices has several; the first one stands for all.
    """
    parameter = block._reg_params.get(name)
    return parameter._data[0] if parameter is not None and parameter._data else None
