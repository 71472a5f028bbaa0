"""MindSpore's operators have common types, or are listed without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from mindspore import ops
from mindspore.ops import operations

from amanda_core.interface.vocabulary import OP_TYPES as COMMON_TYPES
from amanda_driver_mindspore.mindspore_internals.doors import doors
from amanda_driver_mindspore.vocabulary import DECLARATIONS, written

#: Operators without a common type, one in a line.
WITHOUT = Path(__file__).with_name("operators_without_words.txt")


def operators() -> set[str]:
    """Return MindSpore's name of each forward operator."""
    found = {door.op_type for door in doors() if door.op_type}
    for name, kind in vars(operations).items():
        if isinstance(kind, type) and issubclass(kind, ops.Primitive):
            found.add(name)
    return {name for name in found if "Grad" not in name and "Backward" not in name}


def test_every_operator_has_a_type_or_is_listed() -> None:
    listed = WITHOUT.read_text(encoding="utf-8").split()
    without = {name for name in operators() if DECLARATIONS.get(name) is None}
    assert sorted(without) == listed


@pytest.mark.parametrize(
    ("name", "common_type"),
    [
        ("Dense", "linear"),
        ("BatchMatMul", "matmul"),
        ("__imul__", "mul"),
        ("__itruediv__", "div"),
        ("__invert__", "bitwise_not"),
        ("InplaceReLU", "relu"),
        ("SubScalar", "sub"),
        ("LayerNormExt", "layer_norm"),
        ("TransposeExtView", "transpose"),
        ("ReverseV2", "flip"),
        ("isfinite", "isfinite"),
    ],
)
def test_variants_of_an_operator_have_its_type(name: str, common_type: str) -> None:
    assert DECLARATIONS[name] == common_type
    assert common_type in COMMON_TYPES


def test_what_an_operator_writes_is_known() -> None:
    assert list(written("add_", 2)) == list(written("__iadd__", 2)) == [0]
    assert list(written("__setitem__", 3)) == list(written("InplaceAddExt", 3)) == [0]
    assert list(written("BatchNorm", 9)) == [3, 4]
    for name in ("add", "__add__", "__invert__", "AddExt", "TensorScatterUpdate", "isinf"):
        assert list(written(name, 2)) == []
