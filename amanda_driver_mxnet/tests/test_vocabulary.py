"""MXNet's operators have common types, or are listed without one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import mxnet  # noqa: F401
import pytest
from mxnet.base import _LIB

from amanda_core.interface.vocabulary import OP_TYPES as COMMON_TYPES
from amanda_driver_mxnet.vocabulary import DECLARATIONS

#: Operators without a common type, one in a line.
WITHOUT = Path(__file__).with_name("operators_without_words.txt")

#: Operators of which an attribute tells the type.
BY_ATTRIBUTE = {
    *("Activation", "Convolution", "Convolution_v1", "Deconvolution", "LeakyReLU", "Pooling", "RNN")
}


def operators() -> set[str]:
    """Return MXNet's own name of each forward operator."""
    count, names = ctypes.c_uint(), ctypes.POINTER(ctypes.c_char_p)()
    assert _LIB.MXListAllOpNames(ctypes.byref(count), ctypes.byref(names)) == 0
    found = set()
    for place in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.c_char_p()
        assert _LIB.NNGetOpHandle(names[place], ctypes.byref(handle)) == 0
        assert _LIB.MXSymbolGetAtomicSymbolName(handle, ctypes.byref(name)) == 0
        assert name.value is not None
        found.add(name.value.decode())
    return {name for name in found if "backward" not in name}


def test_every_operator_has_a_type_or_is_listed() -> None:
    listed = WITHOUT.read_text(encoding="utf-8").split()
    without = {name for name in operators() if DECLARATIONS.get(name) is None}
    assert sorted(without - BY_ATTRIBUTE) == listed


@pytest.mark.parametrize(
    ("name", "common_type"),
    [
        ("FullyConnected", "linear"),
        ("_npi_rtrue_divide_scalar", "div"),
        ("broadcast_lesser_equal", "less_equal"),
        ("_np_sum", "sum"),
        ("_npi_where_lscalar", "where"),
        ("_linalg_gemm2", "matmul"),
        ("_npi_identity", "eye"),
        ("_contrib_arange_like", "range"),
    ],
)
def test_affixes_do_not_matter(name: str, common_type: str) -> None:
    assert DECLARATIONS[name] == common_type
    assert common_type in COMMON_TYPES


def test_the_gamma_function_is_not_random() -> None:
    assert DECLARATIONS.get("gamma") is None
