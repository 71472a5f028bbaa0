"""Routines that become native operations, and functions that XLA compiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda import AmandaWarning
from amanda_core.testing.kit.tools import Edit, before, editing

from ..comparison import close, equal
from .handwritten_programs import W, X, half, layer
from .reference_programs import outside, straight

MASK = tf.cast(W > 0, W.dtype)
LARGEST = float(tf.reduce_max(W))


class Mine(ValueError):
    """A user's own error."""


@amanda.staged
def staged_half(value: Any) -> Any:
    return value * 0.5 + 0.3


PLAIN = outside(layer, X, W)
WANTED = outside(lambda x, w: layer(x, straight(w, half)), X, W)


@contextmanager
def warned(count: int, text: str = "XLA") -> Iterator[None]:
    """Require exactly so many of our warnings during this context."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in caught if issubclass(w.category, AmandaWarning)]
    assert len(ours) == count, ours
    assert all(text in message for message in ours)


ROUTINES: dict[str, Callable[[Any], Any]] = {
    "formula": half,
    "captured mask": lambda t: t * MASK[: tf.shape(t)[0]],
    "number": lambda t: t * LARGEST,
    "control flow": lambda t: tf.cond(tf.reduce_sum(t) > 0, lambda: t, lambda: -t),
    "loop": lambda t: tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, t * 0.9), (0, t))[1],
    "function": lambda t: tf.function(half)(t),
    "nothing": lambda t: None,
    "random shape": lambda t: tf.reshape(tf.transpose(tf.transpose(t)), tf.shape(t)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["before", "after", "grad_out", "grad_in"])
@pytest.mark.parametrize("name", ROUTINES)
def test_staged_routines_do_what_host_routines_do(name: str, kind: str) -> None:
    op_type = "Exp" if kind == "after" else "MatMul"
    position = {"before": 1, "grad_in": 1}.get(kind)

    def program(x: Any, w: Any) -> Any:
        return tf.reduce_sum(tf.matmul(x, tf.exp(w)) ** 2)

    def run(mark: Callable[..., Any]) -> list[Any]:
        # A function of its own: the mark stays on it.
        routine = mark(lambda t: ROUTINES[name](t))
        with amanda.apply(editing(Edit(op_type, kind, routine, position))):
            return outside(tf.function(program), X, W)

    close(run(amanda.staged), run(lambda routine: routine))


def test_keyword_arguments_of_staged_routines() -> None:
    @amanda.staged
    def masked(value: Any, *, mask: Any, factor: float) -> Any:
        return value * mask * factor

    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: (
            c.insert_before_op(masked, inputs=[1], mask=MASK, factor=2.0)
            if c.op_type == "MatMul"
            else None
        )
    )
    wanted = tf.matmul(X, W * MASK * 2).numpy()
    with amanda.apply(tool):
        close(tf.function(tf.matmul)(X, W), wanted)


def test_staged_routine_that_reads_a_variable_is_refused() -> None:
    variable = tf.Variable(tf.constant(2.0, tf.float64))
    function = tf.function(lambda x, w: tf.matmul(x, w))
    wanted = tf.matmul(X, W * 2).numpy()
    with (
        pytest.raises(amanda.AmandaError, match="'MatMul/before' reads a variable"),
        amanda.apply(before("MatMul", amanda.staged(lambda t: t * variable), 1)),
    ):
        function(X, W)
    with amanda.apply(before("MatMul", lambda t: t * variable, 1)):
        close(function(X, W), wanted)


def test_error_of_a_staged_routine() -> None:
    @amanda.staged
    def failing(value: Any) -> Any:
        raise Mine("my own")

    function = tf.function(layer)
    with pytest.raises(Mine) as caught, amanda.apply(before("MatMul", failing, 1)):
        function(X, W)
    (note,) = caught.value.__notes__
    assert "failing" in note
    assert "MatMul" in note
    close(outside(function, X, W), PLAIN)


# XLA.


def test_compiled_function_with_nothing_planned_stays_compiled() -> None:
    function = tf.function(layer, jit_compile=True)
    wanted = function(X, W)
    with warned(0), amanda.apply(amanda.Tool()):
        equal(function(X, W), wanted)


def test_compiled_function_with_a_staged_routine_stays_compiled() -> None:
    function = tf.function(layer, jit_compile=True)
    with warned(0), amanda.apply(before("MatMul", staged_half, 1)):
        close(outside(function, X, W), WANTED)
    with warned(0), amanda.apply(before("MatMul", amanda.staged(lambda t: t * MASK), 1)):
        found = function(X, W)
    close(found, layer(X, W * MASK))
    close(outside(function, X, W), PLAIN)


@pytest.mark.parametrize("where", ["outermost", "nested", "around the nested"])
def test_compiled_function_with_a_host_routine_runs_without_xla_and_says_so_once(
    where: str,
) -> None:
    inner = tf.function(layer, jit_compile=where != "around the nested")
    function = inner
    if where != "outermost":
        function = tf.function(lambda x, w: inner(x, w), jit_compile=where != "nested")
    close(outside(function, X, W), PLAIN)
    with warned(1), amanda.apply(before("MatMul", half, 1)):
        close(outside(function, X, W), WANTED)
        close(outside(function, X, W), WANTED)
    close(outside(function, X, W), PLAIN)


def test_compiled_function_with_its_own_tape() -> None:
    function = tf.function(lambda x, w: outside(layer, x, w), jit_compile=True)
    with warned(0), amanda.apply(before("MatMul", staged_half, 1)):
        close(function(X, W), WANTED)
    with warned(1), amanda.apply(before("MatMul", half, 1)):
        close(function(X, W), WANTED)
