"""Every tool on TensorFlow programs of second and mixed order: no tool fails or changes them."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensorflow as tf
from every_tool import EDITING, TOOLS, checked

import amanda
from amanda_core.errors import UnsupportedError

from .higher_order_tf import PROGRAMS

pytestmark = pytest.mark.usefixtures("as_written")
#: Run with the fast tests; the others with the exhaustive ones.
SAMPLE = {
    ("gradient of a gradient", "latency"),
    ("gradient of a gradient", "nonfinite"),
    ("style transfer", "nonfinite"),
    ("jacobian", "dump"),
    ("jacobian", "flops"),
    ("accumulator over a function", "dump"),
    ("accumulator over a function", "trace"),
    ("vectorized map", "graph"),
}
#: Where the driver refuses edits by name: their gradients would have to follow into pfor or a
#: forward accumulator.
REFUSES_EDITS = {
    "jacobian",
    "jacobian of keras",
    "jacobian in a function",
    "batch jacobian",
    "hessian",
    "vectorized map",
    "accumulator over a function",
    "accumulator in a function",
    "forward over reverse",
    "tape around a gradient",
}


def bits(results: list[Any]) -> list[bytes | None]:
    """Return the results of a program as bytes."""
    return [
        None if value is None else tf.convert_to_tensor(value).numpy().tobytes()
        for value in results
    ]


@functools.cache
def plain(program: str, eagerly: bool) -> list[bytes | None]:
    """Return what a program returns without a tool."""
    assert tf.config.functions_run_eagerly() == eagerly
    return bits(PROGRAMS[program]())


def test_there_are_fifteen_programs() -> None:
    assert len(PROGRAMS) >= 15


def same_under(program: str, name: str) -> None:
    """Compare a program under a tool with itself."""
    expected = plain(program, tf.config.functions_run_eagerly())
    tool = (TOOLS | EDITING)[name]()
    try:
        with amanda.apply(tool):
            found = bits(PROGRAMS[program]())
    except UnsupportedError:
        assert name in EDITING
        assert program in REFUSES_EDITS
        return
    assert found == expected
    checked(name, tool)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        pytest.param(
            program, name, marks=[] if (program, name) in SAMPLE else pytest.mark.exhaustive
        )
        for program in PROGRAMS
        for name in TOOLS | EDITING
    ],
)
def test_the_program_runs_as_without_it(program: str, name: str) -> None:
    same_under(program, name)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        pytest.param(program, name, marks=[] if name == "flops" else pytest.mark.exhaustive)
        for program in ("third order", "hessian", "forward over reverse", "gradient penalty")
        for name in TOOLS | EDITING
    ],
)
def test_the_program_runs_eagerly_as_without_it(program: str, name: str) -> None:
    tf.config.run_functions_eagerly(True)
    try:
        same_under(program, name)
    finally:
        tf.config.run_functions_eagerly(False)
