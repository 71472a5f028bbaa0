"""TensorFlow's asynchronous execution: a call returns before what it called has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import Edit, before, editing

from ..comparison import close
from .handwritten_programs import W, X, half, layer
from .reference_programs import straight


class Mine(ValueError):
    """A user's own error."""


def outside(program: Callable[..., Any]) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        result = program(X, W)
    return [result, *tape.gradient(result, [X, W])]


WANTED = outside(lambda x, w: layer(x, straight(w, half)))
PLAIN = outside(layer)


@pytest.fixture(autouse=True)
def _asynchronous() -> Iterator[None]:
    tf.config.experimental.set_synchronous_execution(False)
    yield
    tf.config.experimental.set_synchronous_execution(True)


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
def test_edits(staging: bool, function: bool) -> None:
    calls: list[int] = []

    def counted(gradient: Any) -> Any:
        calls.append(1)
        return gradient * 3

    edits = Edit("MatMul", "before", amanda.staged(lambda w: half(w)) if staging else half, 1)
    program = tf.function(layer) if function else layer
    with amanda.apply(editing(edits, Edit("MatMul", "grad_in", counted, 1))):
        for _ in range(3):
            y, dx, dw = outside(program)
            close([y, dx, dw / 3], WANTED)
    assert len(calls) == 3
    close(outside(program), PLAIN)


@pytest.mark.parametrize("point", ["before", "after", "grad_out", "grad_in"])
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_an_error_is_raised_by_the_call_that_ran_the_routine(function: bool, point: str) -> None:
    def failing(*values: Any) -> None:
        raise Mine("my own")

    program = tf.function(layer) if function else layer
    with amanda.apply(editing(Edit("MatMul", point, failing))):
        for _ in range(2):
            with pytest.raises(Mine, match="my own") as caught:
                outside(program)
            assert "failing, op 'MatMul'" in caught.value.__notes__[0]
    close(outside(program), PLAIN)


def test_an_error_of_the_program_stays_its_own() -> None:
    function = tf.function(lambda x: tf.debugging.check_numerics(tf.math.log(x), "not a number"))
    with (
        pytest.raises(tf.errors.InvalidArgumentError, match="not a number"),
        amanda.apply(before("Log", lambda t: t * 1.0)),
    ):
        function(-tf.abs(X)).numpy()
    tf.experimental.async_clear_error()  # As without tools.
    np.testing.assert_allclose(function(tf.abs(X)), np.log(np.abs(X)))
