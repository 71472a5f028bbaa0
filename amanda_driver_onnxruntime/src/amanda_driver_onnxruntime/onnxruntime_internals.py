"""Every private name of ONNX Runtime that the driver uses, and how values pass to and from it.

Owns the entry points of sessions, what is read from a session and its options, and the conversion
between `OrtValue` and NumPy's arrays.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import onnx
from onnx import external_data_helper, helper, numpy_helper
from onnxruntime import (
    GraphOptimizationLevel,
    InferenceSession,
    IOBinding,
    OrtDevice,
    OrtValue,
    SessionOptions,
)
from onnxruntime.capi.onnxruntime_inference_collection import Session

from amanda_driver_onnxruntime.vocabulary import DECLARATIONS

__all__ = [
    "ENTRY_POINTS",
    "LARGE",
    "LARGEST",
    "Binding",
    "OrtValue",
    "Part",
    "UnknownModelError",
    "append",
    "array_for",
    "array_of",
    "constant",
    "dtype_of",
    "fits",
    "given_options",
    "identity",
    "is_borrowed",
    "is_packed",
    "level_of",
    "listed",
    "model_of",
    "options_of",
    "ort_value",
    "outside",
    "providers_of",
    "type_of",
]

#: The ways to run a session, and what must be noted for one of them: class, method.
ENTRY_POINTS = (
    (IOBinding, "bind_output"),
    (Session, "run"),
    (Session, "run_async"),
    (Session, "run_with_iobinding"),
    (Session, "run_with_ort_values"),
    (Session, "run_with_ortvaluevector"),
)
#: What a session writes to files; its parts must not.
_OF_FILES = {"optimized_model_filepath", "enable_profiling", "profile_file_prefix"}
#: Environment variable: with the value "optimized" tools see what optimisations left.
_GRAPH = "AMANDA_ONNXRUNTIME_GRAPH"
#: Bytes of a model above which its weights stand outside: protobuf has at most 2 GiB.
LARGEST = 2**31 - 2**20
#: Bytes of a weight from which it stands there.
LARGE = 1024
#: The file of weights that are passed to a session, which does not read one then.
_NOWHERE = "amanda"
_FOLDER = "session.model_external_initializers_file_folder_path"


class UnknownModelError(Exception):
    """The model of a session cannot be read; the message says which sessions these are."""


def model_of(session: Any) -> tuple[onnx.ModelProto, str]:
    """Return the model of a session, and the folder of the files that hold its weights.

    Raises:
        UnknownModelError: It has none.
    """
    path, data = session._model_path, session._model_bytes
    if path is None and data is None:
        raise UnknownModelError("sessions of model packages")
    is_ort = str(path).endswith(".ort") or (data or b"")[4:8] == b"ORTM"
    given = given_options(session)
    if is_ort or _configured(given, "session.load_model_format").upper() == "ORT":
        raise UnknownModelError("sessions of models in ONNX Runtime's own format (.ort)")
    folder = os.path.dirname(os.path.abspath(path)) if path else _configured(given, _FOLDER)
    try:
        if path:
            model = onnx.load_model(path, load_external_data=False)
        else:
            model = onnx.load_model_from_string(data)
    except Exception as error:  # Its file is gone, or has become anything else.
        raise UnknownModelError(f"sessions whose model cannot be read again ({error})") from error
    names = [one.name for one in session.get_inputs()]
    weights = {one.name for one in model.graph.initializer}
    if names != [one.name for one in model.graph.input if one.name not in weights]:
        raise UnknownModelError("sessions whose file has changed since")
    if any(node.op_type == "EPContext" for node in model.graph.node):
        raise UnknownModelError("sessions of models that are compiled for a device (EPContext)")
    if os.environ.get(_GRAPH) == "optimized":
        return _optimized(session, path or data, folder), folder
    return model, folder


def _optimized(session: Any, source: Any, folder: str) -> onnx.ModelProto:
    """Return the graph that a session runs once it has fused operators."""
    with tempfile.TemporaryDirectory() as made:
        options = options_of(given_options(session), folder)
        options.graph_optimization_level = session.get_session_options().graph_optimization_level
        options.optimized_model_filepath = os.path.join(made, "model.onnx")
        # It says that the file fits this machine only.
        options.log_severity_level = 3
        InferenceSession(source, options, providers=providers_of(session))
        return onnx.load_model(options.optimized_model_filepath)


def given_options(session: Any) -> Any:
    """Return the options that the program gave, of which not all can be read; None without any."""
    return session._sess_options_initial


def _configured(given: Any, key: str) -> str:
    """Return an option that is a text; empty if it is not set."""
    try:
        return "" if given is None else str(given.get_session_config_entry(key))
    except RuntimeError:  # It is not set.
        return ""


def level_of(session: Any) -> int:
    """Return how far a session optimises the graph that tools see.

    Returns:
        0 if it does not, 1 for basic optimisations, or more.
    """
    sees_all = os.environ.get(_GRAPH) == "optimized"
    return 0 if sees_all else int(session.get_session_options().graph_optimization_level)


def options_of(given: Any, folder: str) -> SessionOptions:
    """Return new options for parts of the model of a session. Its own are not changed.

    Args:
        given: Its own, or None.
        folder: The folder of the files that hold weights.
    """
    options = SessionOptions()
    for name in dir(options) if given is not None else ():
        value = getattr(given, name)
        if not (name.startswith("_") or callable(value) or name in _OF_FILES):
            setattr(options, name, value)
    for key in DECLARATIONS.names["options"]:
        if text := _configured(given, key):
            options.add_session_config_entry(key, text)
    if os.environ.get(_GRAPH) == "optimized":
        options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    # There are many parts, and their threads must not wait by spinning.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if folder:
        options.add_session_config_entry(_FOLDER, folder)
    return options


def providers_of(session: Any) -> list[tuple[str, Any]]:
    """Return the execution providers of a session, with their options."""
    options = session.get_provider_options()
    return [(name, options.get(name, {})) for name in session.get_providers()]


class Part:
    """A part of a model, as a session of its own.

    Attributes:
        inputs: The names of the values that it needs.
        outputs: The names of those that it computes.
        kinds: Output -> its type, if it is a sequence.

    Args:
        session: The session.
        kept: What it needs in memory.
    """

    def __init__(self, session: InferenceSession, kept: Any = None) -> None:
        self._kept = kept
        self.inputs = [one.name for one in session.get_inputs()]
        self.outputs = [one.name for one in session.get_outputs()]
        typed = {one.name: one.type for one in session.get_outputs()}
        self.kinds = {name: _parsed(t) for name, t in typed.items() if t.startswith("seq(tensor")}
        self._defaults = [one.name for one in session.get_overridable_initializers()]
        self._run: Any = session._sess

    @classmethod
    def of(
        cls,
        model: onnx.ModelProto,
        options: SessionOptions,
        providers: Sequence[Any],
        outside: Mapping[str, Any],
    ) -> Part:
        """Make the session of a part.

        Args:
            model: The model of the part.
            options: Its options, which change.
            providers: Its execution providers.
            outside: Values of weights that the model names only, as `outside` makes them.
        """
        if outside:
            options.add_external_initializers(list(outside), list(outside.values()))
        data = model.SerializeToString()
        return cls(InferenceSession(data, options, providers=list(providers)), outside)

    def run(
        self, values: Mapping[str, Any], run_options: Any, names: Sequence[str] = ()
    ) -> list[Any]:
        """Compute outputs, all by default, from the inputs, which are of types of `ort_value`."""
        feeds, outputs = {name: values[name] for name in self.inputs}, names or self.outputs
        feeds |= {name: values[name] for name in self._defaults if name in values}
        if all(isinstance(value, OrtValue) for value in feeds.values()):
            given = {name: value._ortvalue for name, value in feeds.items()}
            found = self._run.run_with_ort_values(given, outputs, run_options)
            # Iteration over ONNX Runtime's vector ends by an exception of C++, which takes long.
            return [OrtValue(found[place]) for place in range(len(found))]
        # Texts pass only this way.
        return list(self._run.run(outputs, feeds, run_options))


def outside(array: Any, name: str) -> onnx.TensorProto:
    """Return a weight without its values, which a session gets beside its model."""
    kind = element_of(array)
    found = onnx.TensorProto(name=name, data_type=kind, dims=array.shape, raw_data=b"")
    external_data_helper.set_external_data(found, _NOWHERE, 0, array.nbytes)
    found.ClearField("raw_data")
    return found


def identity(kind: onnx.TypeProto) -> onnx.ModelProto:
    """Return a model whose output is its input, which is called ``value``."""
    node = helper.make_node("Identity", ["value"], ["same"])
    graph = helper.make_graph(
        [node],
        "identity",
        [helper.make_value_info("value", kind)],
        [helper.make_value_info("same", kind)],
    )
    return _small(graph)


def constant(value: Any) -> onnx.ModelProto:
    """Return a model whose output is an array. It has no nodes, whose kernels lack some types."""
    weight = numpy_helper.from_array(value, "value")
    output = helper.make_value_info("value", type_of(value))
    return _small(helper.make_graph([], "constant", [], [output], [weight]))


def _small(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


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
    if array.dtype.kind in "OUST":
        return array
    if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1:
        return OrtValue.ortvalue_from_numpy(array)
    # NumPy does not have the type itself: `ml_dtypes` does.
    kind, bits = helper.np_dtype_to_tensor_dtype(array.dtype), array.dtype.itemsize * 8
    if array.dtype.name in _PACKED:
        raw = numpy.zeros(array.shape, numpy.uint8)
        packed = array.astype(numpy.int8).view(numpy.uint8).reshape(-1) & 15
        packed = numpy.append(packed, numpy.zeros(packed.size % 2, numpy.uint8))
        raw.reshape(-1)[: packed.size // 2] = packed[::2] | packed[1::2] << 4
    else:
        raw = array.view(numpy.dtype(f"uint{bits}"))
    return OrtValue.ortvalue_from_numpy_with_onnx_type(raw, int(kind))


#: Types of which a byte holds two elements.
_PACKED = {"int4": True, "uint4": False}


def is_packed(array: Any) -> bool:
    """Return True for elements of half a byte, for which ONNX Runtime has few kernels."""
    return str(array.dtype.name) in _PACKED


def is_borrowed(value: Any) -> bool:
    """Return True if the memory of a value is that of an array, which only the object holds.

    ONNX Runtime's own value, and so arrays and bindings made of it, does not.
    """
    return value._numpy_obj is not None


def array_of(value: Any) -> Any:
    """Return the array that shares the memory of a tensor; other values stay as they are."""
    if not isinstance(value, OrtValue) or not value.is_tensor():
        return value
    dtype = numpy.dtype(helper.tensor_dtype_to_np_dtype(value.element_type()))
    if dtype.isbuiltin == 1 or dtype.kind == "O":
        return value._numpy_obj if is_borrowed(value) else value.numpy()
    if value.device_name() != "cpu":
        return value
    size, shape = value.tensor_size_in_bytes(), tuple(value.shape())
    memory: Any = (ctypes.c_char * size).from_address(value.data_ptr()) if size else b""
    if size:
        memory.owner = value  # It must live as long as the array.
    if dtype.name not in _PACKED:
        return numpy.frombuffer(memory, dtype).reshape(shape)
    halves = numpy.frombuffer(memory, numpy.uint8)
    numbers = numpy.stack([halves & 15, halves >> 4], -1).reshape(-1)[: int(numpy.prod(shape))]
    if _PACKED[dtype.name]:
        numbers = (numbers.astype(numpy.int8) ^ 8) - 8
    return numbers.astype(dtype).reshape(shape)


def type_of(value: Any, lengths: bool = False) -> onnx.TypeProto:
    """Return the type of a value, with its rank, and with its lengths if that is asked."""
    if isinstance(value, OrtValue) and value.is_tensor():
        shape = value.shape() if lengths else [None] * len(value.shape())
        return helper.make_tensor_type_proto(value.element_type(), shape)
    if isinstance(value, OrtValue):
        return _parsed(value.data_type())
    if isinstance(value, list):
        inner = element_of(value[0]) if value else onnx.TensorProto.FLOAT
        return helper.make_sequence_type_proto(helper.make_tensor_type_proto(inner, None))
    return helper.make_tensor_type_proto(element_of(value), [None] * value.ndim)


def element_of(value: Any) -> int:
    """Return ONNX's number of the type of an array's elements."""
    dtype = numpy.asarray(value).dtype
    return int(_TEXT if dtype.kind in "OUST" else helper.np_dtype_to_tensor_dtype(dtype))


def dtype_of(kind: str) -> Any:
    """Return NumPy's type of a tensor's elements; None for another kind of value.

    Args:
        kind: The type as ONNX Runtime writes it.
    """
    if not kind.startswith("tensor"):
        return None
    element = _parsed(kind).tensor_type.elem_type
    return numpy.dtype(helper.tensor_dtype_to_np_dtype(element))


def fits(value: Any, kind: str) -> bool:
    """Return False for an array of another type than an input, which ONNX Runtime refuses.

    Args:
        value: What a program passes.
        kind: The type of the input as ONNX Runtime writes it.
    """
    if not kind.startswith("tensor") or not isinstance(value, (numpy.ndarray, OrtValue)):
        return True
    found = element_of(value) if isinstance(value, numpy.ndarray) else value.element_type()
    return bool(found == _parsed(kind).tensor_type.elem_type)


_TEXT = onnx.TensorProto.STRING
#: ONNX Runtime's names of types of elements, where they differ.
_ELEMENTS = {"float": "FLOAT", "float16": "FLOAT16", "double": "DOUBLE"}


def _parsed(text: str) -> onnx.TypeProto:
    """Return the type that ONNX Runtime calls ``seq(tensor(float))``."""
    outer, _, inner = text.partition("(")
    if outer == "tensor":
        name = inner.rstrip(")")
        return helper.make_tensor_type_proto(
            onnx.TensorProto.DataType.Value(_ELEMENTS.get(name, name.upper())), None
        )
    if outer == "map":
        key, _, inner = inner.partition(",")
        element = onnx.TensorProto.DataType.Value(key.upper())
        return helper.make_map_type_proto(element, _parsed(inner.removesuffix(")")))
    make = {"seq": helper.make_sequence_type_proto, "optional": helper.make_optional_type_proto}
    found: onnx.TypeProto = make[outer](_parsed(inner.removesuffix(")")))
    return found


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


def append(vector: Any, values: Sequence[Any]) -> None:
    """Append values to a vector of ONNX Runtime."""
    for value in values:
        vector.push_back(value._ortvalue)


class Binding:
    """The values that a program bound to the inputs and outputs of a session.

    Attributes:
        binding: ONNX Runtime's object.
        names: The names of the outputs.

    Args:
        binding: The object.
        devices: Name of an output -> the type and number of the device on which ONNX Runtime
            allocates it.
    """

    def __init__(self, binding: IOBinding, devices: Mapping[str, tuple[str, int]]) -> None:
        self.binding: Any = binding
        self._outputs: dict[str, Any] = dict(self.binding._bound_outputs)
        self._devices = dict(devices)
        self.names = list(self._outputs)

    @property
    def has_address(self) -> bool:
        """Return True if an output may be bound by its address, which cannot be read back."""
        bound = self._outputs.items()
        return any(value is None and name not in self._devices for name, value in bound)

    def inputs(self) -> dict[str, Any] | None:
        """Return the values of the inputs; None if there is only the address of one."""
        arrays, found = self.binding._numpy_obj_references, {}
        for name, value in self.binding._bound_inputs.items():
            value = arrays.get(name) if value is None else value
            if value is None:
                return None
            found[name] = value
        return found

    def give(self, values: Sequence[Any]) -> None:
        """Let the program find these values where it has bound the outputs."""
        for name, value in zip(self.names, values, strict=True):
            bound = self._outputs[name]
            if bound is None:
                self.binding._iobinding.bind_ortvalue_output(name, value._ortvalue)
            else:
                bound.update_inplace(value)

    def restore(self) -> None:
        """Bind the outputs again as the program did, for a run without tools."""
        for name, bound in self._outputs.items():
            if bound is None and self.binding._bound_outputs.get(name, self) is None:
                device = OrtDevice.make(*self._devices[name])._get_c_device()
                self.binding._iobinding.bind_output(name, device)
