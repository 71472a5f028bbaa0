"""Formulas of common types: each type has a class, and contractions equal plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from amanda_core.interface.facts import Facts
from amanda_core.interface.vocabulary import OP_TYPES
from amanda_tools.flops.formulas import FREE, MATMUL, NORM, REDUCTIONS, UNCOUNTED, contraction
from amanda_tools.kit.tensors.types import Size, size_of

CLASSES = (FREE, MATMUL, NORM, REDUCTIONS, UNCOUNTED)


def test_each_word_is_in_one_class() -> None:
    for one, other in itertools.combinations(CLASSES, 2):
        assert not one & other
    assert set().union(*CLASSES) <= set(OP_TYPES)


def test_the_rest_is_elementwise() -> None:
    # A type that is added to the vocabulary must be assigned a cost.
    assert " ".join(sorted(set(OP_TYPES) - set().union(*CLASSES))) == (
        "abs acos add affine_grid asin atan atan2 bitwise_and bitwise_not bitwise_or "
        "bitwise_xor ceil celu clip cos cosh cumprod cumsum dequantize div dropout elu equal "
        "erf erfc exp expm1 fake_quantize floor floor_div fold gelu glu greater greater_equal "
        "grid_sample hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan "
        "leaky_relu lerp less less_equal log log10 log1p log2 log_sigmoid log_softmax "
        "logical_and logical_not logical_or logical_xor maximum minimum mish mod mul neg "
        "not_equal pow prelu quantize reciprocal relu relu6 round rrelu rsqrt selu sigmoid "
        "sign silu sin sinh softmax softplus softshrink sqrt square sub tan tanh threshold "
        "trunc upsample"
    )


LENGTHS = {"a": 2, "b": 3, "c": 4, "d": 5}
terms = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True).map("".join)


@given(terms, terms, st.data())
def test_a_contraction_of_two(left: str, right: str, data: st.DataObject) -> None:
    axes = sorted({*left, *right})
    kept = "".join(data.draw(st.lists(st.sampled_from(axes), unique=True)))
    sizes = [Size(LENGTHS[axis] for axis in term) for term in (left, right)]
    # The loops over what is in both or in the output; the rest is summed before.
    loops = {axis for axis in axes if axis in kept or (axis in left and axis in right)}
    expected = math.prod(LENGTHS[axis] for axis in loops)
    assert contraction(f"{left},{right}->{kept}", sizes) == [expected]


def test_contractions() -> None:
    assert contraction("ij->ji", [Size((2, 3))]) == []
    assert contraction("i,i", [Size((3,)), Size((3,))]) == [3]
    assert contraction("ij, jk", [Size((2, 3)), Size((3, 4))]) == [24]
    assert contraction("...ij,...jk->...ik", [Size((7, 2, 3)), Size((5, 1, 3, 4))]) == [840]
    with pytest.raises(ValueError, match="zip"):
        contraction("ij,jk", [Size((2, 3))])


class Shape(tuple[int | None, ...]):
    """A tensor with a shape and nothing else."""


class Shapes(Facts):
    def is_tensor(self, value: object) -> bool:
        return isinstance(value, Shape)

    def dtype(self, tensor: Shape) -> str:
        return "float32"

    def shape(self, tensor: Shape) -> tuple[int | None, ...]:
        return tuple(tensor)

    def stored(self, tensor: Shape) -> int | None:
        return 4 if tensor == (5, 5) else None


def test_sizes() -> None:
    facts = Shapes()
    assert size_of(facts, Shape((2, 3))) == (2, 3)
    assert size_of(facts, [Shape((2,)), 7]) == ((2,), None)
    assert size_of(facts, 3.5) is None
    assert size_of(facts, Shape((2, 3))).elements == 6
    assert size_of(facts, Shape((2, 3))).stored is None
    assert size_of(facts, Shape((5, 5))).stored == 4
    with pytest.raises(ValueError, match="a shape is not known"):
        size_of(facts, Shape((None, 3)))
