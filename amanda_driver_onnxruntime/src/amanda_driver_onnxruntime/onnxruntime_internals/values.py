"""Values as ONNX Runtime has them and as NumPy's arrays, and their types.

NumPy lacks some types of elements. `ml_dtypes` has them, and ONNX knows their bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy
import onnx
from onnx import external_data_helper, helper, numpy_helper
from onnxruntime import OrtValue

__all__ = [
    "OrtValue",
    "array_for",
    "array_of",
    "constant",
    "dtype_of",
    "fits",
    "is_text",
    "listed",
    "ort_value",
    "outside",
    "owned",
    "parsed",
    "type_of",
]

_TEXT = onnx.TensorProto.STRING
#: The file of weights that are passed to a session, which does not read one then.
_NOWHERE = "amanda"


def array_for(value: Any, kind: str) -> Any:
    """Return what a program passes for an input as an array of the input's type.

    Arrays, values of ONNX Runtime and inputs other than tensors are returned unchanged.

    Args:
        value: An array, a number, lists of numbers, or a value of ONNX Runtime.
        kind: The type of the input as ONNX Runtime writes it, such as ``tensor(float)``.
    """
    if isinstance(value, (OrtValue, numpy.ndarray)) or not kind.startswith("tensor"):
        return value
    return numpy.array(value, dtype_of(kind))


def ort_value(value: Any) -> Any:
    """Return a value as ONNX Runtime takes it: `OrtValue`, an array of texts, list or dict."""
    if isinstance(value, (OrtValue, list, dict)):
        return value
    array = numpy.asarray(value, order="C")
    if is_text(array):
        return array
    return OrtValue.ortvalue_from_numpy(array) if _is_builtin(array.dtype) else _copied(array)


def _is_builtin(dtype: Any) -> bool:
    """Return True if NumPy itself has the type."""
    return bool(dtype.isbuiltin == 1)


def _copied(array: Any) -> OrtValue:
    """Return a copy of an array as an `OrtValue` that owns its memory."""
    found = OrtValue.ortvalue_from_shape_and_type(array.shape, element_of(array))
    data = numpy_helper.from_array(array).raw_data
    ctypes.memmove(found.data_ptr(), data, len(data))
    return found


def array_of(value: Any) -> Any:
    """Return a tensor as an array, of the same memory if NumPy has the type.

    A sequence, a map, an array, and a tensor on a device whose type NumPy lacks are returned
    unchanged.
    """
    if not isinstance(value, OrtValue) or not value.is_tensor():
        return value
    dtype, borrowed = _dtype(value.element_type()), value._numpy_obj
    if _is_builtin(dtype) or dtype.kind == "O":
        return value.numpy() if borrowed is None else borrowed
    if value.device_name() != "cpu":
        return value
    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return numpy_helper.to_array(
        onnx.TensorProto(data_type=value.element_type(), dims=value.shape(), raw_data=data)
    )


def owned(value: Any) -> Any:
    """Return a value that the program may keep, as an `OrtValue` that owns its memory.

    An `OrtValue` that was made of an array borrows the array's memory. The Python object keeps the
    array alive, but what is made of the `OrtValue`, such as a binding, does not.

    Args:
        value: An array or an `OrtValue` that borrows is copied. An `OrtValue` that owns its memory
            is returned unchanged, and so are values other than tensors. Arrays of texts are not
            taken: `Parts.owned` takes these as well.
    """
    if isinstance(value, OrtValue) and value._numpy_obj is None:
        return value
    array = array_of(value)
    return _copied(array) if isinstance(array, numpy.ndarray) else value


def constant(value: Any) -> onnx.ModelProto:
    """Return a model without inputs, whose only output ``value`` is an array."""
    weight = numpy_helper.from_array(value, "value")
    output = helper.make_value_info("value", type_of(value))
    graph = helper.make_graph([], "constant", [], [output], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def is_text(value: Any) -> bool:
    """Return True for an array of texts."""
    return isinstance(value, numpy.ndarray) and value.dtype.kind in "OUST"


def listed(session: Any, value: Any) -> Any:
    """Return a value as `InferenceSession.run` does: arrays, sequences as lists, maps as dicts.

    Args:
        session: Any session with an output.
        value: A value, of any type.
    """
    if not isinstance(value, OrtValue):
        return value
    if value.is_tensor():
        # The memory may be that of an input, of a weight, or of what a routine keeps.
        return numpy.array(array_of(value))
    binding = session.io_binding()
    binding.bind_ortvalue_output(session.get_outputs()[0].name, value)
    return binding.copy_outputs_to_cpu()[0]


def outside(array: Any, name: str) -> onnx.TensorProto:
    """Return a weight of this name without its values, which a session gets beside its model."""
    found = onnx.TensorProto(name=name, data_type=element_of(array), dims=array.shape, raw_data=b"")
    external_data_helper.set_external_data(found, _NOWHERE, 0, array.nbytes)
    found.ClearField("raw_data")
    return found


def type_of(value: Any, lengths: bool = False) -> onnx.TypeProto:
    """Return the type of a value, with its rank.

    Args:
        value: An `OrtValue`, an array, or a list of arrays.
        lengths: Whether a tensor in an `OrtValue` has its lengths as well.
    """
    if isinstance(value, OrtValue) and value.is_tensor():
        shape = value.shape() if lengths else [None] * len(value.shape())
        return helper.make_tensor_type_proto(value.element_type(), shape)
    if isinstance(value, OrtValue):
        return parsed(value.data_type())
    if isinstance(value, list):
        inner = element_of(value[0]) if value else onnx.TensorProto.FLOAT
        return helper.make_sequence_type_proto(helper.make_tensor_type_proto(inner, None))
    return helper.make_tensor_type_proto(element_of(value), [None] * value.ndim)


def element_of(value: Any) -> int:
    """Return ONNX's number of the type of an array's elements."""
    array = numpy.asarray(value)
    return int(_TEXT if is_text(array) else helper.np_dtype_to_tensor_dtype(array.dtype))


def _dtype(element: int) -> Any:
    """Return NumPy's type of elements, given ONNX's number of it."""
    return numpy.dtype(helper.tensor_dtype_to_np_dtype(element))


def dtype_of(kind: str) -> Any:
    """Return NumPy's type of a tensor's elements; None for another kind of value.

    Args:
        kind: The type as ONNX Runtime writes it.
    """
    return _dtype(parsed(kind).tensor_type.elem_type) if kind.startswith("tensor") else None


def fits(value: Any, kind: str) -> bool:
    """Return False for an array of another type than an input, which ONNX Runtime refuses.

    Args:
        value: What a program passes.
        kind: The type of the input as ONNX Runtime writes it.
    """
    if not kind.startswith("tensor") or not isinstance(value, (numpy.ndarray, OrtValue)):
        return True
    found = element_of(value) if isinstance(value, numpy.ndarray) else value.element_type()
    return bool(found == parsed(kind).tensor_type.elem_type)


def parsed(text: str) -> onnx.TypeProto:
    """Return the type that ONNX Runtime calls ``seq(tensor(float))``."""
    outer, _, inner = text.removesuffix(")").partition("(")
    if outer == "tensor":
        element = onnx.TensorProto.DataType.Value(inner.upper())
        return helper.make_tensor_type_proto(element, None)
    if outer == "map":
        key, _, inner = inner.partition(",")
        element = onnx.TensorProto.DataType.Value(key.upper())
        return helper.make_map_type_proto(element, parsed(inner))
    make = {"seq": helper.make_sequence_type_proto, "optional": helper.make_optional_type_proto}
    found: onnx.TypeProto = make[outer](parsed(inner))
    return found
