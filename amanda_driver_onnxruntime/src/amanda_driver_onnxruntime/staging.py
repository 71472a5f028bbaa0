"""`Recorder` and `Staged`: a routine's arithmetic as nodes of ONNX.

Owns which of NumPy's functions have nodes, and which numbers are quantized by operators. A routine
gets values that carry those of one execution, so that their types and shapes are NumPy's.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import onnx
from numpy.lib.mixins import NDArrayOperatorsMixin
from onnx import helper, numpy_helper

from amanda_driver_onnxruntime.vocabulary import DECLARATIONS

__all__ = ["NotStagedError", "Recorder", "Staged", "quantized"]

#: The first opset whose operators all take axes as inputs, but for reductions.
_OLDEST = 13
#: The first opset that has numbers of 8 bits with an exponent.
_OLDEST_FLOAT8 = 19


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
        single = all(_is_single(one) for one in inputs if one is not None)
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
        return self.weight(_plain(value))


def _is_single(value: Any) -> bool:
    """Return True for a value that has one element for inputs of any size."""
    if isinstance(value, Staged) and not value.is_constant:
        return value.is_single
    return numpy.size(_plain(value)) == 1


def _plain(value: Any) -> Any:
    """Return what a routine computes with as NumPy's, also inside lists."""
    if isinstance(value, Staged):
        return value.value
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
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
            value = ufunc(*map(_plain, inputs))
        recorder = _recorder_of(inputs)
        if recorder is None:
            return Staged(self.recorder, numpy.asarray(value))
        return _elementwise(recorder, ufunc.__name__, inputs, value)

    def __array_function__(
        self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        recorder = _recorder_of([*args, *kwargs.values()])
        if recorder is None:
            plain = {name: _plain(one) for name, one in kwargs.items()}
            return Staged(self.recorder, numpy.asarray(func(*map(_plain, args), **plain)))
        staged = _FUNCTIONS.get(func.__name__)
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
        return _cast(self.recorder, self, numpy.dtype(dtype))

    def transpose(self, *axes: Any) -> Any:
        """Return it with its axes in another order."""
        return numpy.transpose(self, *(axes if len(axes) < 2 else (axes,)))

    def reshape(self, *shape: Any) -> Any:
        """Return its elements in another shape."""
        return numpy.reshape(self, shape[0] if len(shape) == 1 else shape)

    def __getitem__(self, key: Any) -> Any:
        return _picked(self.recorder, self, key if isinstance(key, tuple) else (key,))


#: Methods of arrays that are functions of NumPy with the same arguments.
_METHODS = frozenset(DECLARATIONS.names["methods"])
#: Ufunc of NumPy -> its operator, if this takes the same operands.
_UFUNCS = dict(pair.split("=") for pair in DECLARATIONS.names["ufuncs"])
#: Operators whose result has another type than their operands.
_TELLING = {"Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal", "IsNaN", "IsInf"}
_LOGICAL = {"And", "Or", "Xor", "Not"}


def _elementwise(recorder: Recorder, name: str, inputs: Sequence[Any], value: Any) -> Staged:
    """Add the nodes of a ufunc."""
    if name == "not_equal":
        equal = _elementwise(recorder, "equal", inputs, numpy.logical_not(value))
        return recorder.add("Not", [equal], value)
    if name == "isfinite":
        (x,) = inputs
        parts = [recorder.add(op, [x], f(x.value)) for op, f in _INFINITE]
        return recorder.add("Not", [recorder.add("Or", parts, numpy.logical_not(value))], value)
    if name == "square":
        return recorder.add("Mul", [*inputs, *inputs], value)
    op_type = _UFUNCS.get(name)
    if op_type is None:
        raise NotStagedError(f"numpy.{name} has no node here")
    dtype = numpy.asarray(value).dtype
    if op_type in _TELLING:
        dtype = numpy.result_type(*map(_plain, inputs))
    elif op_type in _LOGICAL and dtype != numpy.bool_:
        raise NotStagedError(f"numpy.{name} of integers has no node here")
    if name == "power" and dtype.kind != "f":
        raise NotStagedError("powers of integers have no node here")
    return recorder.add(op_type, [_cast(recorder, one, dtype) for one in inputs], value)


_INFINITE: Sequence[tuple[str, Callable[[Any], Any]]] = (
    ("IsInf", numpy.isinf),
    ("IsNaN", numpy.isnan),
)


def _cast(recorder: Recorder, x: Any, dtype: Any) -> Staged:
    """Return a value with a dtype; a constant is converted here."""
    if not isinstance(x, Staged) or x.is_constant:
        return Staged(recorder, numpy.asarray(_plain(x)).astype(dtype))
    if x.dtype == dtype:
        return x
    if numpy.dtype(dtype).name.startswith("float8"):
        recorder.need(_OLDEST_FLOAT8)
    return recorder.add("Cast", [x], x.value.astype(dtype), to=_element(dtype))


def _element(dtype: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(numpy.dtype(dtype)))


# Functions of NumPy. Each gets the recorder and what the program calls it with.


def _round(recorder: Recorder, x: Any, decimals: int = 0) -> Staged:
    if decimals or x.dtype.kind != "f":
        raise NotStagedError("it rounds to decimals")
    return recorder.add("Round", [x], numpy.round(x.value))


def _clip(recorder: Recorder, x: Any, a_min: Any = None, a_max: Any = None) -> Staged:
    dtype = numpy.result_type(*(_plain(one) for one in (x, a_min, a_max) if one is not None))
    found, low, high = _cast(recorder, x, dtype), a_min, a_max
    for op_type, bound, limit in (("Max", low, numpy.maximum), ("Min", high, numpy.minimum)):
        if bound is not None:
            if isinstance(bound, int) and dtype.kind in "iu":  # As NumPy, which bounds it.
                bound = min(max(bound, numpy.iinfo(dtype).min), numpy.iinfo(dtype).max)
            given = _cast(recorder, bound, dtype)
            found = recorder.add(op_type, [found, given], limit(found.value, given.value))
    return found


def _where(recorder: Recorder, condition: Any, x: Any, y: Any) -> Staged:
    value = numpy.where(_plain(condition), _plain(x), _plain(y))
    chosen = [_cast(recorder, one, value.dtype) for one in (x, y)]
    return recorder.add("Where", [_cast(recorder, condition, numpy.bool_), *chosen], value)


def _filled(number: int) -> Callable[..., Staged]:
    def filled(recorder: Recorder, a: Any) -> Staged:
        # Its shape is that of the other operand, for inputs of any size.
        shape = recorder.add("Shape", [a], numpy.array(a.value.shape))
        given = numpy_helper.from_array(numpy.full(1, number, a.dtype))
        value = numpy.full_like(a.value, number)
        return recorder.add("ConstantOfShape", [shape], value, value=given)

    return filled


def _reshape(recorder: Recorder, a: Any, shape: Any) -> Staged:
    lengths = numpy.atleast_1d(numpy.array(_plain(shape), numpy.int64))
    return recorder.add("Reshape", [a, lengths], a.value.reshape(lengths))


def _transpose(recorder: Recorder, a: Any, axes: Any = None) -> Staged:
    order = [int(axis) % a.ndim for axis in axes] if axes is not None else range(a.ndim)[::-1]
    return recorder.add("Transpose", [a], a.value.transpose(order), perm=list(order))


def _swapaxes(recorder: Recorder, a: Any, axis1: int, axis2: int) -> Staged:
    order = list(range(a.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return _transpose(recorder, a, order)


def _reduction(op_type: str, since: int, function: Any) -> Callable[..., Staged]:
    """Return the function that adds a reduction, whose axes are an input since some opset."""

    def reduce(
        recorder: Recorder,
        a: Any,
        axis: Any = None,
        *,
        keepdims: bool = False,
        initial: Any = None,
    ) -> Staged:
        value = function(a.value, axis=axis, keepdims=keepdims)
        x = _cast(recorder, a, value.dtype)
        axes = None if axis is None else [int(n) for n in numpy.atleast_1d(axis)]
        if axes == []:
            raise NotStagedError("it reduces along no axis, which ONNX takes for all")
        attrs: dict[str, Any] = {"keepdims": int(keepdims)}
        inputs: list[Any] = [x]
        if axes is not None and recorder.opset >= since:
            inputs.append(numpy.array(axes, numpy.int64))
        elif axes is not None:
            attrs["axes"] = axes
        found = recorder.add(op_type, inputs, value, **attrs)
        found.is_single = found.is_single or axes is None or len(axes) == a.ndim
        if initial is None:
            return found
        if op_type not in ("ReduceMax", "ReduceMin"):
            raise NotStagedError("it reduces from an initial value")
        larger = numpy.maximum if op_type == "ReduceMax" else numpy.minimum
        limited: Staged = larger(found, initial)
        return limited

    return reduce


def _logical(function: Any) -> Callable[..., Staged]:
    def reduce(recorder: Recorder, a: Any, axis: Any = None, *, keepdims: bool = False) -> Staged:
        number = _cast(recorder, _cast(recorder, a, numpy.bool_), numpy.int32)
        return _cast(recorder, function(number, axis=axis, keepdims=keepdims), numpy.bool_)

    return reduce


def _count_nonzero(recorder: Recorder, a: Any, axis: Any = None) -> Staged:
    number = _cast(recorder, _cast(recorder, a, numpy.bool_), numpy.int64)
    found: Any = numpy.sum(number, axis=axis)
    return found  # type: ignore[no-any-return]


def _concatenate(recorder: Recorder, arrays: Sequence[Any], axis: int = 0) -> Staged:
    value = numpy.concatenate(_plain(list(arrays)), axis)
    parts = [_cast(recorder, one, value.dtype) for one in arrays]
    return recorder.add("Concat", parts, value, axis=axis)


def _expand_dims(recorder: Recorder, a: Any, axis: Any) -> Staged:
    axes = numpy.atleast_1d(numpy.array(axis, numpy.int64))
    return recorder.add("Unsqueeze", [a, axes], numpy.expand_dims(a.value, axis))


def _squeeze(recorder: Recorder, a: Any, axis: Any = None) -> Staged:
    if axis is None:
        raise NotStagedError("it squeezes axes that it does not name")
    axes = numpy.atleast_1d(numpy.array(axis, numpy.int64))
    return recorder.add("Squeeze", [a, axes], numpy.squeeze(a.value, axis))


def _pad(recorder: Recorder, array: Any, pad_width: Any) -> Staged:
    value = numpy.pad(array.value, pad_width)
    widths = numpy.broadcast_to(numpy.array(pad_width, numpy.int64), (array.ndim, 2)).T.reshape(-1)
    if array.dtype != numpy.bool_:
        return recorder.add("Pad", [array, widths], value)
    number = recorder.add("Cast", [array], array.value.astype(numpy.int32), to=_element("int32"))
    return _cast(recorder, recorder.add("Pad", [number, widths], value.astype("int32")), "bool")


def _picked(recorder: Recorder, a: Staged, key: tuple[Any, ...]) -> Staged:
    """Return a part by numbers, slices, None and an ellipsis."""
    if a.is_constant:
        return Staged(recorder, numpy.asarray(a.value[_plain(key)]))
    basic = (int, slice, type(None), type(...), numpy.integer)
    if not all(isinstance(one, basic) for one in key):
        raise NotStagedError("it picks elements by an array")
    left = a.ndim - builtins.sum(one is not None and one is not ... for one in key)
    if ... not in key:
        key = (*key, ...)
    at = key.index(...)
    spread = [*key[:at], *[slice(None)] * left, *key[at + 1 :]]
    found, axis, gone, new = a, 0, list[int](), list[int]()
    for place, one in enumerate(spread):
        if one is None:
            new.append(place - len(gone))
            continue
        part = one if isinstance(one, slice) else slice(one, one + 1 if one != -1 else None)
        if part != slice(None):
            step = 1 if part.step is None else part.step
            first = (0 if step > 0 else -1) if part.start is None else part.start
            ends = (2**31 - 1) if step > 0 else -(2**31)
            last = ends if part.stop is None else part.stop
            numbers = [numpy.array([n], numpy.int64) for n in (first, last, axis, step)]
            value = found.value[(*[slice(None)] * axis, part)]
            found = recorder.add("Slice", [found, *numbers], value)
        if not isinstance(one, slice):
            gone.append(axis)
        axis += 1
    if gone:
        found = _squeeze(recorder, found, tuple(gone))
    return _expand_dims(recorder, found, tuple(new)) if new else found


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("round", "around"), _round),
    "clip": _clip,
    "where": _where,
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "reshape": _reshape,
    "transpose": _transpose,
    "swapaxes": _swapaxes,
    **dict.fromkeys(("max", "amax"), _reduction("ReduceMax", 18, numpy.max)),
    **dict.fromkeys(("min", "amin"), _reduction("ReduceMin", 18, numpy.min)),
    "sum": _reduction("ReduceSum", 13, numpy.sum),
    "mean": _reduction("ReduceMean", 18, numpy.mean),
    "prod": _reduction("ReduceProd", 18, numpy.prod),
    "any": _logical(numpy.max),
    "all": _logical(numpy.min),
    "count_nonzero": _count_nonzero,
    "concatenate": _concatenate,
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "pad": _pad,
    "copy": lambda recorder, a, *_: a,
    "ravel": lambda recorder, a: _reshape(recorder, a, -1),
}

#: Smallest and largest number, type, and the first opset whose operators have it.
_INTEGERS = (
    (-8, 7, "int4", 21),
    (0, 15, "uint4", 21),
    (-128, 127, "int8", 13),
    (0, 255, "uint8", 13),
)


def quantized(x: Staged, scale: Any, zero: Any, limits: tuple[float, float]) -> Staged:
    """Return what `Arithmetic.quantized` returns, by QuantizeLinear and DequantizeLinear.

    A constant becomes integers. Numbers that these operators do not have are computed as real ones.
    """
    recorder, given = x.recorder, numpy.asarray(_plain(scale), numpy.float32)
    low, high, number = int(limits[0]), int(limits[1]), 0 if zero is None else zero
    axes = [n - given.ndim + x.ndim for n, size in enumerate(given.shape) if size != 1]
    fits = [
        (least, most, name)
        for least, most, name, since in _INTEGERS
        if least <= low
        and high <= most
        and recorder.opset >= since
        # What is computed has no kernels for halves of bytes everywhere.
        and (x.is_constant or "4" not in name)
    ]
    of_any_size = isinstance(scale, Staged) and not scale.is_constant and not scale.is_single
    is_usual = x.dtype == numpy.float32 and not isinstance(number, Staged)
    # Of a constant, all elements along one axis may be a block with a scale.
    block = {}
    one = [n for n, size in enumerate(given.shape) if size == 1]
    if x.is_constant and recorder.opset >= 21 and len(axes) == x.ndim - 1 == given.ndim - len(one):
        block = {"axis": one[0], "block_size": x.shape[one[0]]}
    if not fits or not is_usual or (len(axes) > 1 and not block) or of_any_size:
        numbers = numpy.round(x / scale)
        found: Staged = (numpy.clip(numbers + number, low, high) - number) * scale
        return found
    least, most, name = fits[0]
    dtype: Any = numpy.dtype(name) if "4" not in name else _four_bits(name)
    how = block if len(axes) > 1 else {"axis": axes[0] if axes else None}
    with numpy.errstate(all="ignore"):
        integers = numpy.clip(numpy.round(x.value / given) + number, low, high)
        value = ((integers - number) * given).astype(numpy.float32)
    factor: Any = given if len(axes) > 1 else given.reshape(-1 if axes else ())
    if isinstance(scale, Staged) and not scale.is_constant:
        factor = recorder.add("Reshape", [scale, numpy.zeros(0, numpy.int64)], factor)
    zeros = (
        numpy.broadcast_to(number, given.shape).reshape(numpy.shape(_plain(factor))).astype(dtype)
    )
    numbers = integers.astype(dtype)
    if not x.is_constant:
        if (low, high) != (least, most):  # The operators know only all numbers of a type.
            x = _clip(recorder, x, (low - number) * scale, (high - number) * scale)
        numbers = recorder.add("QuantizeLinear", [x, factor, zeros], numbers, **how)
    return recorder.add("DequantizeLinear", [numbers, factor, zeros], value, **how)


def _four_bits(name: str) -> Any:
    element = onnx.TensorProto.INT4 if name == "int4" else onnx.TensorProto.UINT4
    return helper.tensor_dtype_to_np_dtype(element)
