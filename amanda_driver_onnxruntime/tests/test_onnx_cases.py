"""ONNX's own test cases of operators under a tool that only looks: the results are those without.

A part of them runs with the fast tests: those with graphs inside nodes, optional values, sequences,
and shapes that inputs tell.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import onnxruntime
import pytest
from onnx import TensorProto
from onnx.backend.test.case.node import collect_testcases

import amanda

from .onnxruntime_backends import options
from .test_driver import Looking, Observing, same

#: What the names of cases that run with the fast tests contain.
SAMPLE = ("loop", "scan", "_if", "optional", "sequence", "split_to", "causal_conv", "upsample")


#: Whether this release lacks some of the newest operators.
IS_OLD = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32)


@functools.cache
def cases() -> Mapping[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The cases divide by zero while they are made.
        return {case.name: case for case in collect_testcases(None) if case.model is not None}


def rounds_between(model: Any) -> bool:
    """Return True if a cut may change last bits: several nodes compute with float16.

    ONNX Runtime has no kernels for many of these, and then rounds after the last one only.
    """
    text = str(model.SerializeToString())
    kinds = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    half = {one.type.tensor_type.elem_type for one in kinds} & {TensorProto.FLOAT16}
    return len(model.graph.node) > 1 and bool(half or "softmax_precision" in text)


def halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return what the first run, which is cut, and the second one showed."""
    return values[: len(values) // 2], values[len(values) // 2 :]


def is_same(one: Any, other: Any) -> bool:
    """Compare bit for bit, but for texts and types."""
    if not isinstance(one, numpy.ndarray) or one.dtype.hasobject:
        return str(one) == str(other)
    return same(one, other)


def check(names: list[str]) -> None:
    ran = 0
    for name in names:
        case = cases()[name]
        held = {one.name for one in case.model.graph.initializer}
        wanted = [one.name for one in case.model.graph.input if one.name not in held]
        feeds = dict(zip(wanted, case.data_sets[0][0], strict=False))
        try:
            session = onnxruntime.InferenceSession(case.model.SerializeToString(), options(0))
            plain = session.run(None, feeds)
        except Exception:  # ONNX Runtime lacks the operator, or the type.
            continue
        if rounds_between(case.model) or not same(session.run(None, feeds), plain):
            continue
        ran += 1
        with amanda.apply(tool := Looking()):
            for _ in range(2):
                assert same(session.run(None, feeds), plain), name
        assert tool.executed or name == "test_constant"
        with amanda.apply(observer := Observing()):
            for _ in range(2):
                assert same(session.run(None, feeds), plain), name
        first, second = halves(observer.values)
        assert [where for where, _ in first] == [where for where, _ in second], name
        assert len(first) == len(tool.executed), name
        for (where, values), (_, others) in zip(first, second, strict=True):
            assert all(map(is_same, values, others)), (name, where)
        assert same(session.run(None, feeds), plain), name
    assert ran > (0.5 if IS_OLD else 0.6) * len(names)


def test_cases_of_onnx() -> None:
    check([name for name in cases() if any(part in name for part in SAMPLE)])


@pytest.mark.slow
def test_all_cases_of_onnx() -> None:
    check(list(cases()))
