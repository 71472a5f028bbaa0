"""Functions of NumPy as nodes. Each gets the recorder and what a routine calls it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy
from onnx import numpy_helper

from amanda_driver_onnxruntime.staging.recording import (
    FUNCTIONS,
    NotStagedError,
    Recorder,
    Staged,
    plain,
)

__all__: list[str] = []

_Function = Callable[..., Any]
_F = TypeVar("_F", bound=_Function)


def _named(*names: str) -> Callable[[_F], _F]:
    """Register what adds the nodes of the functions with some names."""

    def registered(function: _F) -> _F:
        FUNCTIONS.update(dict.fromkeys(names, function))
        return function

    return registered


@_named("round", "around")
def _round(recorder: Recorder, x: Any, decimals: int = 0) -> Staged:
    if decimals or x.dtype.kind != "f":
        raise NotStagedError("it rounds to decimals")
    return recorder.add("Round", [x], numpy.round(x.value))


@_named("clip")
def _clip(recorder: Recorder, x: Any, a_min: Any = None, a_max: Any = None) -> Any:
    dtype = numpy.result_type(*(plain(one) for one in (x, a_min, a_max) if one is not None))
    found: Any = recorder.cast(x, dtype)
    for limit, bound in ((numpy.maximum, a_min), (numpy.minimum, a_max)):
        if isinstance(bound, int) and dtype.kind in "iu":  # As NumPy, which bounds it.
            bound = min(max(bound, numpy.iinfo(dtype).min), numpy.iinfo(dtype).max)
        if bound is not None:
            found = limit(found, recorder.cast(bound, dtype))
    return found


@_named("where")
def _where(recorder: Recorder, condition: Any, x: Any, y: Any) -> Staged:
    value = numpy.where(plain(condition), plain(x), plain(y))
    chosen = [recorder.cast(one, value.dtype) for one in (x, y)]
    return recorder.add("Where", [recorder.cast(condition, "bool"), *chosen], value)


def _filled(number: int) -> _Function:
    def filled(recorder: Recorder, a: Any) -> Staged:
        # Its shape is that of the other operand, for inputs of any size.
        shape = recorder.add("Shape", [a], numpy.array(a.value.shape))
        given = numpy_helper.from_array(numpy.full(1, number, a.dtype))
        value = numpy.full_like(a.value, number)
        return recorder.add("ConstantOfShape", [shape], value, value=given)

    return filled


@_named("reshape")
def _reshape(recorder: Recorder, a: Any, shape: Any) -> Staged:
    lengths = numpy.atleast_1d(numpy.array(plain(shape), numpy.int64))
    return recorder.add("Reshape", [a, lengths], a.value.reshape(lengths))


@_named("transpose")
def _transpose(recorder: Recorder, a: Any, axes: Any = None) -> Staged:
    order = [int(axis) % a.ndim for axis in axes] if axes is not None else range(a.ndim)[::-1]
    return recorder.add("Transpose", [a], a.value.transpose(order), perm=list(order))


@_named("swapaxes")
def _swapaxes(recorder: Recorder, a: Any, axis1: int, axis2: int) -> Staged:
    order = list(range(a.ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return _transpose(recorder, a, order)


def _reduction(op_type: str, since: int, function: Any, limit: Any = None) -> _Function:
    """Return what adds a reduction.

    Args:
        op_type: Its operator.
        since: The first opset in which the axes are an input.
        function: NumPy's function.
        limit: How an initial value limits the result; None if there may be none.
    """

    def reduce(
        recorder: Recorder, a: Any, axis: Any = None, *, keepdims: bool = False, initial: Any = None
    ) -> Any:
        value = function(a.value, axis=axis, keepdims=keepdims)
        axes = None if axis is None else [int(n) for n in numpy.atleast_1d(axis)]
        if axes == []:
            raise NotStagedError("it reduces along no axis, which ONNX takes for all")
        inputs: list[Any] = [recorder.cast(a, value.dtype)]
        attrs: dict[str, Any] = {"keepdims": int(keepdims)}
        if axes is not None and recorder.opset >= since:
            inputs.append(numpy.array(axes, numpy.int64))
        else:
            attrs["axes"] = axes
        found = recorder.add(op_type, inputs, value, **attrs)
        found.is_single = found.is_single or axes is None or len(axes) == a.ndim
        if initial is None:
            return found
        if limit is None:
            raise NotStagedError("it reduces from an initial value")
        return limit(found, initial)

    return reduce


def _logical(function: Any) -> _Function:
    def reduce(recorder: Recorder, a: Any, axis: Any = None, *, keepdims: bool = False) -> Staged:
        number = recorder.cast(recorder.cast(a, "bool"), "int32")
        return recorder.cast(function(number, axis=axis, keepdims=keepdims), "bool")

    return reduce


@_named("count_nonzero")
def _count_nonzero(recorder: Recorder, a: Any, axis: Any = None) -> Any:
    return recorder.cast(recorder.cast(a, "bool"), "int64").sum(axis=axis)


@_named("concatenate")
def _concatenate(recorder: Recorder, arrays: Sequence[Any], axis: int = 0) -> Staged:
    value = numpy.concatenate(plain(list(arrays)), axis)
    parts = [recorder.cast(one, value.dtype) for one in arrays]
    return recorder.add("Concat", parts, value, axis=axis)


@_named("expand_dims")
def _expand_dims(recorder: Recorder, a: Any, axis: Any) -> Staged:
    axes = numpy.atleast_1d(numpy.array(axis, numpy.int64))
    return recorder.add("Unsqueeze", [a, axes], numpy.expand_dims(a.value, axis))


@_named("squeeze")
def _squeeze(recorder: Recorder, a: Any, axis: Any = None) -> Staged:
    if axis is None:
        raise NotStagedError("it squeezes axes that it does not name")
    axes = numpy.atleast_1d(numpy.array(axis, numpy.int64))
    return recorder.add("Squeeze", [a, axes], numpy.squeeze(a.value, tuple(axes)))


@_named("pad")
def _pad(recorder: Recorder, array: Any, pad_width: Any) -> Staged:
    if array.dtype == numpy.bool_:
        return recorder.cast(_pad(recorder, recorder.cast(array, "int32"), pad_width), "bool")
    widths = numpy.broadcast_to(numpy.array(pad_width, numpy.int64), (array.ndim, 2)).T.reshape(-1)
    return recorder.add("Pad", [array, widths], numpy.pad(array.value, pad_width))


@_named("getitem")
def _picked(recorder: Recorder, a: Staged, key: tuple[Any, ...]) -> Staged:
    """Return a part by numbers, slices, None and an ellipsis."""
    basic = (int, slice, type(None), type(...), numpy.integer)
    if not all(isinstance(one, basic) for one in key):
        raise NotStagedError("it picks elements by an array")
    left = a.ndim - len([one for one in key if one is not None and one is not ...])
    at = key.index(...) if ... in key else len(key)
    spread = [*key[:at], *[slice(None)] * left, *key[at + 1 :]]
    of_axes = [one for one in spread if one is not None]
    parts = [
        one if isinstance(one, slice) else slice(one, one + 1 if one != -1 else None)
        for one in of_axes
    ]
    found, bounds = a, [_bounds(*pair) for pair in enumerate(parts) if pair[1] != slice(None)]
    if bounds:
        numbers = numpy.array(bounds, numpy.int64).T
        found = recorder.add("Slice", [a, *numbers], a.value[tuple(parts)])
    gone = [axis for axis, one in enumerate(of_axes) if not isinstance(one, slice)]
    if gone:
        found = _squeeze(recorder, found, gone)
    of_result = [one for one in spread if one is None or isinstance(one, slice)]
    new = tuple(axis for axis, one in enumerate(of_result) if one is None)
    return _expand_dims(recorder, found, new) if new else found


def _bounds(axis: int, part: slice[Any, Any, Any]) -> tuple[int, int, int, int]:
    """Return what Slice needs of a part of an axis: its start and end, the axis, and the step."""
    step = 1 if part.step is None else part.step
    first = (0 if step > 0 else -1) if part.start is None else part.start
    end = (2**31 - 1) if step > 0 else -(2**31)
    return first, end if part.stop is None else part.stop, axis, step


_named("max", "amax")(_reduction("ReduceMax", 18, numpy.max, numpy.maximum))
_named("min", "amin")(_reduction("ReduceMin", 18, numpy.min, numpy.minimum))
_named("sum")(_reduction("ReduceSum", 13, numpy.sum))
_named("mean")(_reduction("ReduceMean", 18, numpy.mean))
_named("prod")(_reduction("ReduceProd", 18, numpy.prod))
_named("any")(_logical(numpy.max))
_named("all")(_logical(numpy.min))
_named("zeros_like")(_filled(0))
_named("ones_like")(_filled(1))
_named("copy")(lambda recorder, a, *_: a)
_named("ravel")(lambda recorder, a: _reshape(recorder, a, -1))
