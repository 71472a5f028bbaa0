"""Capability ``facts``: what a driver answers when a tool asks about tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from amanda_core.engine.activation import apply
from amanda_core.engine.context import OpContext
from amanda_core.interface.facts import DENSE, Arithmetic, Facts, NotReadableError
from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.rig import Rig


def _looked(rig: Rig, look: Callable[[Facts, Any], Any]) -> list[Any]:
    """Return what `look` finds at the result of each op of one run, inside routines."""
    found: list[Any] = []
    built = rig.build("chain")

    def analyse(context: OpContext) -> None:
        facts = context.facts
        assert facts is not None
        context.insert_after_op(lambda output: found.append(look(facts, output)), outputs=[0])

    with apply(rig.tool(analyse, *built.model.common_types)):
        built.run()
    assert len(found) == 3
    return found


@needs("facts")
def test_a_tensor_is_told_from_other_values(rig: Rig) -> None:
    """Set `Attachment.facts`; answer `is_tensor` with True for results of ops only."""
    assert all(_looked(rig, lambda facts, value: facts.is_tensor(value)))
    others: tuple[Any, ...] = (None, 1, 2.0, True, "text", b"text", [], (), {}, object(), float)
    assert not any(_looked(rig, lambda facts, _: [x for x in others if facts.is_tensor(x)]))


@needs("facts")
def test_dtype_shape_device_and_layout(rig: Rig) -> None:
    """Answer dtypes by plain names such as float32, and layout, shape and device of tensors."""

    def look(facts: Facts, value: Any) -> Any:
        return (facts.dtype(value), facts.shape(value), facts.device(value), facts.layout(value))

    for dtype, shape, device, layout in _looked(rig, look):
        assert dtype.startswith(("float", "bfloat"))
        assert dtype.isidentifier()
        assert shape == rig.backend.shape
        assert isinstance(device, str)
        assert device
        assert layout == DENSE


@needs("facts")
def test_the_values_of_a_tensor(rig: Rig) -> None:
    """Return a copy from `values`, which a tool may keep and change."""
    numpy = pytest.importorskip("numpy", reason="tools read values by NumPy, which is not here")

    def look(facts: Facts, value: Any) -> Any:
        array = numpy.array(facts.values(value))
        before = rig.backend.to_python(value)
        numpy.asarray(facts.values(value))[...] = 77.0
        return array, before, rig.backend.to_python(value)

    for array, before, after in _looked(rig, look):
        assert array.shape == rig.backend.shape
        assert rig.same(array.tolist(), before)
        assert before == after


@needs("facts")
def test_an_array_becomes_a_tensor(rig: Rig) -> None:
    """Return from `tensor` what an operator accepts beside the tensor that it is like."""
    numpy = pytest.importorskip("numpy", reason="tools make masks by NumPy, which is not here")

    def look(facts: Facts, value: Any) -> Any:
        values = numpy.array(facts.values(value))
        product = rig.backend.call("mul", value, facts.tensor(values, value))
        return rig.backend.to_python(product), (values * values).tolist()

    for found, expected in _looked(rig, look):
        assert rig.same(found, expected)


#: What is rounded, limited and counted: the elements of one tensor each.
_NUMBERS = ([0.5, 1.5, -2.5, 0.25], [-0.0, 3.0, -3.5, 7.5], [math.nan, math.inf, -math.inf, 0.5])


def _computed(rig: Rig, compute: Callable[[Any, Facts, Any, Any], Any]) -> None:
    """Compare what `compute` finds by a driver's arithmetic with what it finds by NumPy's."""
    numpy = pytest.importorskip("numpy", reason="NumPy, with which to compare, is not here")

    def look(facts: Facts, value: Any) -> list[tuple[Any, Any]]:
        arithmetic = facts.arithmetic
        if arithmetic is None:
            pytest.skip(f"the driver {rig.info.name!r} provides no arithmetic")
        pairs: list[tuple[Any, Any]] = []
        for numbers in _NUMBERS:
            array = numpy.resize(numbers, rig.backend.shape).astype(facts.dtype(value))
            x = arithmetic.zeros_like(value) + facts.cast(array, value)
            with numpy.errstate(invalid="ignore"):
                expected = compute(Arithmetic(numpy), Facts(), array, array > 0)
            found = compute(arithmetic, facts, x, facts.tensor(array > 0, value))
            pairs += zip(map(facts.values, found), expected, strict=True)
        return pairs

    for pairs in _looked(rig, look):
        for found, expected in pairs:
            numpy.testing.assert_array_equal(found, expected)
            assert numpy.asarray(found).dtype.kind == numpy.asarray(expected).dtype.kind


@needs("facts")
def test_arithmetic_is_that_of_numpy(rig: Rig) -> None:
    """Set `Facts.arithmetic`, so that tools can change values; compute as NumPy does."""

    def compute(arithmetic: Arithmetic, facts: Facts, x: Any, mask: Any) -> list[Any]:
        finite = arithmetic.clip(x, -8.0, 8.0)
        small = arithmetic.astype(x, "float16")
        return [
            *(arithmetic.round(x), arithmetic.clip(x, -1.0, 2.0), arithmetic.clip(x, 0.5)),
            *(arithmetic.clip(x, high=0.5), arithmetic.zeros_like(x)),
            *(arithmetic.reshape(x, (-1,)), arithmetic.where(mask, x, x * 2.0)),
            *(arithmetic.sum(finite), arithmetic.sum(finite, -1, keepdims=True)),
            *(arithmetic.largest(x, None), arithmetic.largest(x, (0,))),
            *(small, arithmetic.round(small), arithmetic.astype(small, "float32")),
            *(x * 2.0 + x, 1.0 / (abs(finite) + 1.0), finite - finite / 4.0),
        ]

    _computed(rig, compute)


@needs("facts")
def test_elements_are_counted_as_by_numpy(rig: Rig) -> None:
    """Set `Arithmetic.counts` if the framework counts with integers of 64 bits."""

    def compute(arithmetic: Arithmetic, facts: Facts, x: Any, mask: Any) -> list[Any]:
        if arithmetic.module.__name__ != "numpy" and not arithmetic.counts:
            pytest.skip(f"the driver {rig.info.name!r} counts in main memory")
        filled = arithmetic.astype(x, "bool")
        matrix = arithmetic.reshape(filled, (2, -1))
        padded = arithmetic.pad(matrix, (1, 2))
        counts = arithmetic.count_nonzero(padded, (1,))
        return [
            *(filled, padded, counts, arithmetic.permute_dims(matrix, (1, 0))),
            *(arithmetic.any(matrix, (1, 0)), arithmetic.sum(counts * 2)),
            *(arithmetic.astype(arithmetic.sum(counts), "float64"), abs(x) < 1.0),
        ]

    _computed(rig, compute)


@needs("facts")
def test_the_memory_of_a_tensor(rig: Rig) -> None:
    """Keep the key of `storage` while a tensor lives, and give other memory another key."""
    alive: list[Any] = []

    def look(facts: Facts, value: Any) -> Any:
        alive.append(value)
        try:
            return [facts.storage(value) for _ in range(2)]
        except NotReadableError as why:
            pytest.skip(f"the driver {rig.info.name!r}: {why}")

    found = _looked(rig, look)
    for first, second in found:
        assert first is not None
        assert (first.key, first.nbytes) == (second.key, second.nbytes)
        assert first.nbytes > 0
    assert len({first.key for first, _ in found}) == 3


@needs("facts")
def test_writes_views_and_parameters(rig: Rig) -> None:
    """Answer `version`, `base` and the like; a framework without them keeps the defaults."""

    def look(facts: Facts, value: Any) -> Any:
        version = facts.version(value)
        assert version is None or isinstance(version, int)
        users = facts.users(value)
        assert users is None or users >= 1
        return facts.is_tensor(facts.base(value)), facts.is_parameter(value)

    assert _looked(rig, look) == [(True, False)] * 3
