"""`Recorder` and `Staged`: the values that a routine gets to become nodes, and what records them.

Owns functions of elements and casts. Other functions of NumPy are registered in `FUNCTIONS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import onnx
from numpy.lib.mixins import NDArrayOperatorsMixin
from onnx import helper, numpy_helper

from amanda_driver_onnxruntime.vocabulary import DECLARATIONS

__all__ = ["FUNCTIONS", "NotStagedError", "Recorder", "Staged", "is_single", "plain"]

#: The first opset whose operators all take axes as inputs, but for reductions.
_OLDEST = 13
#: The first opset that has numbers of 8 bits with an exponent.
_OLDEST_FLOAT8 = 19
#: Methods of arrays that are functions of NumPy with the same arguments.
_METHODS = frozenset(DECLARATIONS.names["methods"])
#: Ufunc of NumPy -> its operator, if this takes the same operands.
_UFUNCS = dict(pair.split("=") for pair in DECLARATIONS.names["ufuncs"])
#: Ufunc of NumPy that is made of others.
_COMPOSED: Mapping[str, Callable[..., Any]] = {
    "isfinite": lambda x: ~(numpy.isinf(x) | numpy.isnan(x)),
    "not_equal": lambda x, y: ~numpy.equal(x, y),
    "square": lambda x: x * x,
}
#: Operators whose result has another type than their operands.
_TELLING = {"Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal", "IsNaN", "IsInf"}
_LOGICAL = {"And", "Or", "Xor", "Not"}
#: Name of another function of NumPy -> what adds its nodes, given the recorder and the arguments.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


class NotStagedError(Exception):
    """A routine cannot become nodes; the message says why."""


class Recorder:
    """Records the nodes of one call of a routine.

    Attributes:
        nodes: The nodes, in order.
        weights: The constants that they read, by name.
        reads_shape: Whether the routine has asked for a shape, on which the nodes may depend.

    Args:
        opset: The version of ONNX's operators in the model.
        prefix: What all names begin with.
    """

    def __init__(self, opset: int, prefix: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self.reads_shape = False
        self.opset, self._prefix = opset, prefix
        self._known: dict[Any, str] = {}

    def weight(self, value: Any) -> str:
        """Return the name of a constant."""
        array = numpy.asarray(value)
        key = array.dtype.name, array.shape, array.tobytes()
        if key not in self._known:
            name = self._known[key] = f"{self._prefix}constant{len(self._known)}"
            self.weights[name] = numpy_helper.from_array(array, name)
        return self._known[key]

    def add(self, op_type: str, inputs: Sequence[Any], result: Any, **attrs: Any) -> Staged:
        """Add a node.

        Args:
            op_type: Its operator.
            inputs: What it reads: staged values, arrays, or None for an input that is not given.
            result: What it computes here.
            **attrs: Its attributes; None leaves one out.
        """
        self.need(_OLDEST)
        names = ["" if one is None else self.name(one) for one in inputs]
        name = f"{self._prefix}{len(self.nodes)}"
        given = {key: one for key, one in attrs.items() if one is not None}
        self.nodes.append(helper.make_node(op_type, names, [name], f"{name}/{op_type}", **given))
        single = all(is_single(one) for one in inputs if one is not None)
        return Staged(self, numpy.asarray(result), name, single)

    def need(self, opset: int) -> None:
        """Refuse older versions of ONNX's operators."""
        if self.opset < opset:
            raise NotStagedError(
                f"the model has version {self.opset} of ONNX's operators, and {opset} is needed: "
                "convert it by onnx.version_converter"
            )

    def name(self, value: Any) -> str:
        """Return the name under which nodes read a value."""
        if isinstance(value, Staged) and not value.is_constant:
            return value.name
        return self.weight(plain(value))

    def elementwise(self, name: str, inputs: Sequence[Any], value: Any) -> Staged:
        """Add the nodes of a ufunc, which computes `value` here."""
        if name in _COMPOSED:
            composed: Staged = _COMPOSED[name](*inputs)
            return composed
        op_type, dtype = _UFUNCS.get(name), numpy.asarray(value).dtype
        if op_type is None:
            raise NotStagedError(f"numpy.{name} has no node here")
        if op_type in _TELLING:
            dtype = numpy.result_type(*map(plain, inputs))
        elif (op_type in _LOGICAL and dtype.kind != "b") or (name == "power" and dtype.kind != "f"):
            raise NotStagedError(f"numpy.{name} of {dtype} has no node here")
        return self.add(op_type, [self.cast(one, dtype) for one in inputs], value)

    def cast(self, x: Any, dtype: Any) -> Staged:
        """Return a value with a dtype; a constant is converted here."""
        dtype = numpy.dtype(dtype)
        if not isinstance(x, Staged) or x.is_constant:
            return Staged(self, numpy.asarray(plain(x)).astype(dtype))
        if x.dtype == dtype:
            return x
        if dtype.name.startswith("float8"):
            self.need(_OLDEST_FLOAT8)
        element = int(helper.np_dtype_to_tensor_dtype(dtype))
        return self.add("Cast", [x], x.value.astype(dtype), to=element)


def is_single(value: Any) -> bool:
    """Return True for a value that has one element for inputs of any size."""
    if isinstance(value, Staged) and not value.is_constant:
        return value.is_single
    return numpy.size(plain(value)) == 1


def plain(value: Any) -> Any:
    """Return what a routine computes with as NumPy's, also inside lists."""
    if isinstance(value, Staged):
        return value.value
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


def _recorder_of(values: Any) -> Recorder | None:
    """Return the recorder if any value depends on the model's inputs."""
    for one in values:
        if isinstance(one, (list, tuple)):
            found = _recorder_of(one)
            if found is not None:
                return found
        elif isinstance(one, Staged) and not one.is_constant:
            return one.recorder
    return None


class Staged(NDArrayOperatorsMixin):
    """A value in a routine that becomes nodes.

    Attributes:
        recorder: Records what is computed with it.
        value: What it is in this execution.
        name: Its name in the model; empty for a constant.
        is_single: Whether it has one element for inputs of any size.
    """

    def __init__(
        self, recorder: Recorder, value: Any, name: str = "", is_single: bool = False
    ) -> None:
        self.recorder, self.value, self.name, self.is_single = recorder, value, name, is_single

    @property
    def is_constant(self) -> bool:
        """True if it is the same for all inputs of the model."""
        return not self.name

    @property
    def dtype(self) -> Any:
        """The NumPy dtype of its elements."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return int(self.value.ndim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths. Nodes may depend on them."""
        self.recorder.reads_shape |= not self.is_constant
        return tuple(self.value.shape)

    @property
    def size(self) -> int:
        """How many elements it has. Nodes may depend on it."""
        return int(numpy.prod(self.shape, dtype=int))

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.size * int(self.dtype.itemsize)

    @property
    def T(self) -> Any:
        """The same with its axes in reverse order."""
        return numpy.transpose(self)

    def __len__(self) -> int:
        return self.shape[0]

    def _known(self, what: str) -> Any:
        if self.is_constant:
            return self.value
        raise NotStagedError(f"it reads values ({what}), which differ between executions")

    def __bool__(self) -> bool:
        return bool(self._known("bool"))

    def __float__(self) -> float:
        return float(self._known("float"))

    def __int__(self) -> int:
        return int(self._known("int"))

    def __index__(self) -> int:
        return int(self._known("index").__index__())

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return numpy.asarray(self._known("numpy.asarray"), *args)

    def __iter__(self) -> Any:
        return (self[n] for n in range(len(self)))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise NotStagedError("it writes into a value")

    def __getattr__(self, name: str) -> Any:
        """Return a method of arrays that is a function of NumPy, too."""
        function = getattr(numpy, name, None) if name in _METHODS else None
        if function is None:
            raise AttributeError(f"a staged value has no {name}")

        def method(*args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        return method

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            raise NotStagedError(f"it calls numpy.{ufunc.__name__} with options")
        with numpy.errstate(all="ignore"):
            value = ufunc(*map(plain, inputs))
        recorder = _recorder_of(inputs)
        if recorder is None:
            return Staged(self.recorder, numpy.asarray(value))
        return recorder.elementwise(ufunc.__name__, inputs, value)

    def __array_function__(
        self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        recorder = _recorder_of([*args, *kwargs.values()])
        if recorder is None:
            options = {name: plain(one) for name, one in kwargs.items()}
            return Staged(self.recorder, numpy.asarray(func(*map(plain, args), **options)))
        staged = FUNCTIONS.get(func.__name__)
        if staged is None:
            raise NotStagedError(f"numpy.{func.__name__} has no nodes here")
        try:
            inspect.signature(staged).bind(recorder, *args, **kwargs)
        except TypeError as error:
            raise NotStagedError(f"it calls numpy.{func.__name__} with options") from error
        with numpy.errstate(all="ignore"):
            return staged(recorder, *args, **kwargs)

    def astype(self, dtype: Any, **kwargs: Any) -> Staged:
        """Return the nearest numbers of a dtype."""
        return self.recorder.cast(self, dtype)

    def transpose(self, *axes: Any) -> Any:
        """Return it with its axes in another order."""
        return numpy.transpose(self, *(axes if len(axes) < 2 else (axes,)))

    def reshape(self, *shape: Any) -> Any:
        """Return its elements in another shape."""
        return numpy.reshape(self, shape[0] if len(shape) == 1 else shape)

    def __getitem__(self, key: Any) -> Any:
        key = key if isinstance(key, tuple) else (key,)
        if self.is_constant:
            return Staged(self.recorder, numpy.asarray(self.value[plain(key)]))
        return FUNCTIONS["getitem"](self.recorder, self, key)
