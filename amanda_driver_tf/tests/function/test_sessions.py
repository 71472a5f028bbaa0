"""Switches, caches, nested tools, and tools that come or go between forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda import AmandaWarning, OpContext
from amanda_core.testing.kit.tools import (
    analysed,
    at_inputs,
    before,
    tool,
    watching,
    watching_backward,
)

from ..comparison import close, equal
from .handwritten_programs import EDITED, W, X, half, layer
from .patches import fingerprint
from .reference_programs import straight


def forward(program: Callable[..., Any]) -> tuple[Any, Any]:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([X, W])
        result = program(X, W)
    return tape, result


def outside(program: Callable[..., Any]) -> list[Any]:
    tape, result = forward(program)
    return [result, *tape.gradient(result, [X, W])]


PLAIN = outside(layer)
WANTED = outside(lambda x, w: layer(x, straight(w, half)))


@contextmanager
def warned(count: int) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [w.category for w in caught] == [AmandaWarning] * count, [str(w.message) for w in caught]


def test_disabled_and_enabled() -> None:
    function = tf.function(layer)
    seen, watch = watching()
    with amanda.apply(EDITED, watch):
        with amanda.disabled():
            close(outside(function), PLAIN)
            assert seen == []
            with amanda.enabled():
                close(outside(function), WANTED)
        close(outside(function), WANTED)
    assert seen.count("MatMul") == 2


@pytest.mark.parametrize("whole", [False, True])
def test_disabled_counts_as_it_stands_when_the_gradient_is_asked_for(whole: bool) -> None:
    calls: list[Any] = []
    function = tf.function(layer)
    with amanda.apply(EDITED, at_inputs("MatMul", lambda g: calls.append(g), 1)):
        tape, y = forward(function)
        with amanda.disabled():
            close(tape.gradient(y, [X, W]), WANTED[1:])
        assert calls == []
        close(tape.gradient(y, [X, W]), WANTED[1:])
    assert len(calls) == 1


def test_forward_run_while_disabled_keeps_its_own_gradient() -> None:
    function = tf.function(layer)
    with amanda.apply(EDITED):
        with amanda.disabled():
            tape, y = forward(function)
        close([y, *tape.gradient(y, [X, W])], PLAIN)
        close(outside(function), WANTED)


def test_leaving_between_forward_and_backward_keeps_edits_and_runs_no_routine() -> None:
    calls: list[Any] = []
    pairs, watch = watching_backward()
    function = tf.function(layer)
    found = fingerprint()
    with amanda.apply(EDITED, at_inputs("MatMul", calls.append, 1), watch):
        held = [forward(function) for _ in range(2)]
    with warned(1):
        for tape, y in held:
            close([y, *tape.gradient(y, [X, W])], WANTED)
    assert calls == []
    assert pairs == []
    assert fingerprint() == found
    close(outside(function), PLAIN)


def test_leaving_with_forward_edits_only_gives_no_warning() -> None:
    function = tf.function(layer)
    with amanda.apply(EDITED):
        tape, y = forward(function)
    with warned(0):
        close([y, *tape.gradient(y, [X, W])], WANTED)


@pytest.mark.parametrize("traced", [False, True])
def test_entering_between_forward_and_backward_changes_nothing(traced: bool) -> None:
    function = tf.function(layer)
    if traced:
        close(outside(function), PLAIN)
    tape, y = forward(function)
    with amanda.apply(EDITED):
        close([y, *tape.gradient(y, [X, W])], PLAIN)
    close(outside(function), PLAIN)


def test_other_tools_at_backward_than_at_forward() -> None:
    function = tf.function(layer)
    with amanda.apply(EDITED):
        tape, y = forward(function)
    with amanda.apply(before("MatMul", lambda t: t * 100, 1)):
        close([y, *tape.gradient(y, [X, W])], WANTED)


def test_nested_tools_between_forward_and_backward() -> None:
    function = tf.function(layer)
    with amanda.apply(amanda.Tool()):
        with amanda.apply(EDITED):
            tape, y = forward(function)
        close([y, *tape.gradient(y, [X, W])], WANTED)
        close(outside(function), PLAIN)


def test_calls_of_several_sessions_interleaved_before_one_backward() -> None:
    function = tf.function(layer)

    def factor(number: float) -> Any:
        return lambda t: t * number

    with tf.GradientTape() as tape:
        tape.watch([X, W])
        total = tf.reduce_sum(function(X, W))
        for number in (2.0, 3.0):
            with amanda.apply(before("MatMul", factor(number), 1)):
                total += tf.reduce_sum(function(X, W))
    found = tape.gradient(total, [X, W])
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        total = tf.reduce_sum(layer(X, W))
        for number in (2.0, 3.0):
            total += tf.reduce_sum(layer(X, straight(W, factor(number))))
    close(found, tape.gradient(total, [X, W]))


def test_function_that_dies_between_forward_and_backward() -> None:
    with amanda.apply(EDITED):
        tape, y = forward(tf.function(layer))
        close([y, *tape.gradient(y, [X, W])], WANTED)
        tape, y = forward(tf.function(layer))
    close([y, *tape.gradient(y, [X, W])], WANTED)


def test_nested_apply_stacks_and_unstacks() -> None:
    function = tf.function(lambda x, w: tf.matmul(x, w))
    double, plus = before("MatMul", lambda t: t * 2, 1), before("MatMul", lambda t: t + 1, 1)
    first, both = tf.matmul(X, W * 2).numpy(), tf.matmul(X, W * 2 + 1).numpy()
    with amanda.apply(double):
        close(function(X, W), first)
        with amanda.apply(plus):
            close(function(X, W), both)
        close(function(X, W), first)
    close(function(X, W), tf.matmul(X, W))


# Analysis once, and again.


def counting() -> tuple[list[str], amanda.Tool]:
    runs: list[str] = []

    def analyse(context: OpContext) -> None:
        runs.append(context.name)
        context.insert_before_op(half, inputs=[1])

    return runs, tool(analyse, "MatMul")


def test_the_same_tool_again_is_not_analysed_again() -> None:
    runs, counted = counting()
    function = tf.function(layer)
    for _ in range(3):
        with amanda.apply(counted):
            close(outside(function), WANTED)
    assert runs == ["MatMul"]


def test_invalidated_tools_are_analysed_again_at_once() -> None:
    function = tf.function(layer)
    scale = [2.0]
    scheduled = tool(
        lambda c: c.insert_before_op(lambda t, s=scale[0]: t * s, inputs=[1]), "MatMul"
    )
    wanted = [layer(X, W * s).numpy() for s in (2.0, 5.0, 7.0)]
    with amanda.apply(scheduled):
        close(function(X, W), wanted[0])
        scale[0] = 5.0
        close(function(X, W), wanted[0])
        scheduled.invalidate()
        close(function(X, W), wanted[1])
    scale[0] = 7.0
    scheduled.invalidate()
    with amanda.apply(scheduled):
        close(function(X, W), wanted[2])


def test_without_the_cache_analysis_runs_at_every_execution() -> None:
    runs, counted = counting()
    function = tf.function(layer)
    with amanda.apply(counted):
        function(X, W)
        with amanda.cache_disabled():
            function(X, W)
            function(X, W)
        assert len(runs) == 3
        function(X, W)
        assert len(runs) == 3


def test_a_routine_registered_while_applied_is_analysed() -> None:
    function = tf.function(layer)
    late = amanda.Tool()
    with amanda.apply(late):
        close(outside(function), PLAIN)
        late.add_inst_for_op(
            lambda c: c.insert_before_op(half, inputs=[1]) if c.op_type == "MatMul" else None
        )
        close(outside(function), WANTED)


def test_state_in_a_context_is_shared_by_tools_and_points() -> None:
    found: list[Any] = []
    writer = tool(lambda c: c.__setitem__("mark", c.get_op_id()), "MatMul")
    reader = tool(lambda c: found.append(c.get("mark")), backward=True)
    reader.depends_on(writer)
    with amanda.apply(reader):
        outside(tf.function(layer))
    assert len([mark for mark in found if mark is not None]) == 2


def test_steps_end_with_the_outermost_call() -> None:
    ended: list[int] = []
    inner = tf.function(layer)
    outer = tf.function(lambda x, w: inner(inner(x, w), w))
    counted = amanda.Tool()
    counted.add_inst_for_step(end=ended.append)
    with amanda.apply(counted):
        outer(X, W)
        outer(X, W)
    assert ended == [0, 1]


def test_routines_that_run_functions_are_not_instrumented() -> None:
    seen, watch = watching()
    helper = tf.function(lambda t: tf.matmul(t, t))
    function = tf.function(layer)
    with amanda.apply(
        watch, before("Tanh", lambda t: helper(tf.matmul(t, t, transpose_b=True))[:, :1])
    ):
        function(X, W)
    assert seen.count("MatMul") == 1


def test_apply_inside_a_routine_is_an_error() -> None:
    def routine(value: Any) -> None:
        with amanda.apply(amanda.Tool()):
            pass

    with (
        pytest.raises(amanda.AmandaError, match="apply-in-routine"),
        amanda.apply(before("Tanh", routine)),
    ):
        tf.function(layer)(X, W)


def test_analysis_of_the_backward_program_while_traced_gradients_are_cached() -> None:
    function = tf.function(layer)
    close(outside(function), PLAIN)
    contexts, watch = analysed(backward=True)
    for _ in range(2):
        with amanda.apply(watch):
            equal(outside(function), PLAIN)
    types = [c.op_type for c in contexts if c.forward is not None]
    assert sorted(types) == ["MatMul", "MatMul", "TanhGrad"]
