"""Index of a dump: its operators, its tensors, and what is missing.

Defines the index and its JSON form. An index may come from an untrusted source, so everything is
checked when it is read, and a file name must not contain a path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from amanda_core.errors import ResultError
from amanda_core.results import tables as results
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.output.rendering import fields_of, render_json
from amanda_tools.kit.tensors.statistics import Statistics

__all__ = [
    "INDEX",
    "WHAT",
    "DumpIndex",
    "DumpedArguments",
    "DumpedOp",
    "DumpedTensor",
    "LeftOut",
    "read_index",
]

FORMAT = "amanda.dump/1"
#: Name of the index in the folder of a dump.
INDEX = "index.json"
#: The kinds of tensors that an operator has.
WHAT = ("input", "weight", "output", "grad_output", "grad_input")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
T = TypeVar("T")


@dataclass
class DumpedOp(OpFacts):
    """One operator that ran, or was about to run, while the dump was taken.

    Attributes:
        inputs: Dtype and shape of each input in the first execution, such as ``float32[8,3]``; None
            for an input that is not a tensor.
        input_roles: Roles of the leading inputs, such as ``weight``, as far as known.
        layout: Order of the axes of the data, such as ``NHWC``, if known.
        weight_layout: Order of the axes of the weight, such as ``OIHW``, if known.
        calls: Number of executions while the dump was taken.
    """

    inputs: list[str | None]
    input_roles: list[str]
    layout: str | None
    weight_layout: str | None
    calls: int = 0


@dataclass
class DumpedTensor:
    """One tensor of a dump.

    Attributes:
        op: Number of its operator in the index.
        step: The step.
        execution: Number of earlier executions of the operator; for a gradient, the number of
            gradients of this kind that arrived earlier.
        what: One of `WHAT`.
        position: Position in the operator's signature; ``2.0`` is the first element of a list at 2.
        name: Name of that position, or an empty string.
        dtype: Name of the dtype.
        shape: The shape.
        file: Name of the file with the values; None if there are only statistics.
        key: Key of the tensor in that file.
        stored: Dtype in the file. ``bfloat16`` and 8-bit floating point are stored as unsigned
            integers with the same bits. ``complex128`` in safetensors is stored as ``float64`` with
            a last axis of 2.
        statistics: The statistics, if requested.
        weight: The parameter, or the part of it, that an input is, such as ``Net:experts.w[3]``;
            None if it is none.
    """

    op: int
    step: int
    execution: int
    what: str
    position: str
    name: str
    dtype: str
    shape: list[int]
    file: str | None = None
    key: str | None = None
    stored: str | None = None
    statistics: Statistics | None = None
    weight: str | None = None


@dataclass
class DumpedArguments:
    """The arguments of an execution, and of those after it, until other ones are listed.

    Attributes:
        op: Number of the operator in the index.
        execution: Number of earlier executions of the operator.
        values: The arguments by the names of the operator's positions and attributes, as
            `dump.arguments` encodes them.
    """

    op: int
    execution: int
    values: dict[str, Any]


@dataclass
class LeftOut:
    """Tensors that are missing from the dump.

    Attributes:
        reason: Why they are missing.
        tensors: How many there are.
        bytes: Their total size, as far as known.
        first: Name of the operator of the first one.
        step: Step of the first one.
    """

    reason: str
    first: str
    step: int
    tensors: int = 0
    bytes: int = 0


@dataclass
class DumpIndex:
    """Contents of a dump.

    Attributes:
        ops: The operators in the order of their first execution.
        tensors: The tensors in the order in which they were written.
        left_out: What is missing.
        tool_seconds: Time spent in the tool.
        wall_seconds: Time from the first operator to the last.
        arguments: The arguments of executions, if they were recorded.
    """

    ops: list[DumpedOp] = field(default_factory=list)
    tensors: list[DumpedTensor] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    arguments: list[DumpedArguments] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the whole index as JSON."""
        return render_json({"format": FORMAT, "merge": {"tensors": []}, **fields_of(self)})


def read_index(file: Path) -> DumpIndex:
    """Read an index.

    Raises:
        ResultError: The file cannot be read, or is not an index.
    """
    read = results.load(file)
    try:
        return _index(read)
    except _Malformed as error:
        raise ResultError(
            f"This is not an index of a dump: {error}"[:300],
            where=str(file),
            fix="Write the dump again",
        ) from None


class _Malformed(Exception):
    """Raised if an index is malformed."""


def _index(read: Any) -> DumpIndex:
    top = _mapping(read, "it")
    if top.get("format") != FORMAT:
        raise _Malformed(f"its format is {str(top.get('format'))[:40]!r}, not {FORMAT!r}")
    index = DumpIndex(
        [_op(item, f"ops[{i}]") for i, item in enumerate(_list(top, "ops", "it"))],
        [_tensor(item, f"tensors[{i}]") for i, item in enumerate(_list(top, "tensors", "it"))],
        [_left_out(item, f"left_out[{i}]") for i, item in enumerate(_list(top, "left_out", "it"))],
        _of(top, "tool_seconds", _is_number, "it"),
        _of(top, "wall_seconds", _is_number, "it"),
        [
            _arguments(item, f"arguments[{i}]")
            for i, item in enumerate(_list({"arguments": [], **top}, "arguments", "it"))
        ],
    )
    for number, tensor in enumerate(index.tensors):
        if tensor.op >= len(index.ops):
            raise _Malformed(f"tensors[{number}] is of operator {tensor.op}, of {len(index.ops)}")
    return index


def _op(item: Any, where: str) -> DumpedOp:
    read = _mapping(item, where)
    return DumpedOp(
        id=_of(read, "id", _is_count, where),
        **{name: _of(read, name, _is_text, where) for name in ("type", "name", "module")},
        **{name: _of(read, name, _is_text_or_none, where) for name in ("word", "source")},
        namespace=_of(read, "namespace", _is_text, where),
        inputs=_of(read, "inputs", _is_texts_or_none, where),
        input_roles=_of(read, "input_roles", _is_texts, where),
        layout=_of(read, "layout", _is_text_or_none, where),
        weight_layout=_of(read, "weight_layout", _is_text_or_none, where),
        calls=_of(read, "calls", _is_count, where),
    )


def _tensor(item: Any, where: str) -> DumpedTensor:
    read = _mapping(item, where)
    figures = read.get("statistics")
    return DumpedTensor(
        **{name: _of(read, name, _is_count, where) for name in ("op", "step", "execution")},
        what=_of(read, "what", lambda value: value in WHAT, where),
        **{name: _of(read, name, _is_text, where) for name in ("position", "name", "dtype")},
        shape=_of(read, "shape", _is_shape, where),
        file=_of(read, "file", _is_name_or_none, where),
        **{name: _of(read, name, _is_text_or_none, where) for name in ("key", "stored")},
        statistics=None if figures is None else _statistics(figures, f"{where}.statistics"),
        weight=_of({"weight": None, **read}, "weight", _is_text_or_none, where),
    )


def _statistics(item: Any, where: str) -> Statistics:
    read = _mapping(item, where)
    return Statistics(
        **{name: _of(read, name, _is_count, where) for name in ("count", "nan", "inf", "zeros")},
        **{
            name: _of(read, name, lambda value: value is None or _is_number(value), where)
            for name in ("min", "max", "mean", "std", "norm")
        },
        histogram=_of(read, "histogram", _is_counts, where),
    )


def _arguments(item: Any, where: str) -> DumpedArguments:
    read = _mapping(item, where)
    return DumpedArguments(
        **{name: _of(read, name, _is_count, where) for name in ("op", "execution")},
        values=_of(read, "values", lambda value: isinstance(value, dict), where),
    )


def _left_out(item: Any, where: str) -> LeftOut:
    read = _mapping(item, where)
    return LeftOut(
        **{name: _of(read, name, _is_text, where) for name in ("reason", "first")},
        **{name: _of(read, name, _is_count, where) for name in ("step", "tensors", "bytes")},
    )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Malformed(f"{where} is not an object")
    return value


def _list(read: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value: list[Any] = _of(read, name, lambda value: isinstance(value, list), where)
    return value


def _of(read: Mapping[str, Any], name: str, test: Callable[[Any], bool], where: str) -> Any:
    if name not in read:
        raise _Malformed(f"{where} has no {name!r}")
    if not test(read[name]):
        raise _Malformed(f"{name!r} of {where} is {str(read[name])[:40]!r}")
    return read[name]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_shape(value: Any) -> bool:
    return _is_counts(value) and len(value) <= 64 and math.prod(value) < 1 << 48


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1.8e308 and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_texts_or_none(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text_or_none, value))


def _is_name_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and _NAME.fullmatch(value) is not None)
