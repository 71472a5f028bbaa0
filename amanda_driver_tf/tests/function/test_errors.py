"""The errors of failing routines and wrong requests, and that programs run afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.errors import (
    LateActionError,
    PositionError,
    ReplacementConflictError,
    RoutineResultError,
)
from amanda_core.testing.kit.tools import Edit, after, at_inputs, before, editing, tool

from ..comparison import close
from .reference_programs import values

X, W = values((2, 3), (3, 3))


class Mine(ValueError):
    """A user's own error."""


def failing(*values: Any) -> Any:
    raise Mine("my own")


def layer(x: Any, w: Any) -> Any:
    return tf.nn.relu(tf.matmul(x, w))


def outside(program: Callable[..., Any]) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        result = program(X, W)
    return [result, *tape.gradient(result, [X, W])]


PLAIN = outside(layer)
PRODUCT = tf.matmul(X, W)


class Failing(amanda.Tool):
    """A tool with a name, whose routine fails at one point of one op."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.add_inst_for_op(self.analyse, backward=point.startswith("raw "))

    def analyse(self, context: OpContext) -> None:
        if context.op_type in ("Relu", "ReluGrad"):
            getattr(context, self.point.removeprefix("raw "))(failing)


POINTS = [
    "insert_before_op",
    "insert_after_op",
    "replace_op",
    "insert_before_backward_op",
    "insert_after_backward_op",
    "replace_backward_op",
    "raw insert_before_backward_op",
    "raw insert_after_backward_op",
    "raw replace_backward_op",
]


FORMS: dict[str, Callable[[Any], Any]] = {
    "tape outside": lambda f: lambda: outside(f),
    "tape inside": lambda f: lambda: tf.function(lambda: outside(f))(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("point", POINTS)
def test_own_error_with_one_note_that_names_tool_routine_and_op(point: str, form: str) -> None:
    function = tf.function(layer)
    run = FORMS[form](function)
    close(outside(function), PLAIN)
    with pytest.raises(Mine, match="my own") as caught, amanda.apply(Failing(point)):
        run()
    # A replacement and its derivative may both have failed by then.
    note, *others = caught.value.__notes__
    assert all("Then also" in other for other in others)
    assert point.removeprefix("raw ") in note
    assert "tool Failing" in note
    assert "routine failing" in note
    assert "Relu" in note
    assert "id " in note
    assert "test_errors.py:" in note
    close(outside(function), PLAIN)


@pytest.mark.parametrize("where", ["loop", "branch", "nested"])
def test_own_error_from_inner_functions(where: str) -> None:
    inner = tf.function(layer)
    programs = {
        "loop": lambda x, w: tf.while_loop(
            lambda i, _: i < 2, lambda i, x: (i + 1, layer(x, w)), (0, x)
        )[1],
        "branch": lambda x, w: tf.cond(tf.reduce_sum(x) < 1e9, lambda: layer(x, w), lambda: x),
        "nested": lambda x, w: inner(x, w),
    }
    function = tf.function(programs[where])
    wanted = outside(programs[where])
    for point in POINTS[:5]:
        with pytest.raises(Mine) as caught, amanda.apply(Failing(point)):
            outside(function)
        assert len(caught.value.__notes__) == 1
    close(outside(function), wanted)


def test_the_same_session_goes_on_after_an_error() -> None:
    function = tf.function(layer)
    fail = [True]

    def sometimes(value: Any) -> None:
        if fail[0]:
            raise Mine

    with amanda.apply(before("Relu", sometimes)):
        with pytest.raises(Mine):
            outside(function)
        fail[0] = False
        close(outside(function), PLAIN)
        fail[0] = True
        with pytest.raises(Mine):
            outside(function)


def test_several_errors_of_one_run() -> None:
    function = tf.function(lambda x: [tf.exp(x), tf.sin(x), tf.cos(x)])
    raised: list[int] = []

    def fail(value: Any) -> None:
        raised.append(len(raised))
        time.sleep(0.02)  # Executors go on with what does not wait for this.
        raise Mine(f"number {raised[-1]}")

    tools = [before(op_type, fail) for op_type in ("Exp", "Sin", "Cos")]
    with pytest.raises(Mine, match="number 0") as caught, amanda.apply(*tools):
        function(X)
    _, *others = caught.value.__notes__
    assert others == [f"Then also Mine: number {number}" for number in raised[1:]]
    function(X)


def test_a_failed_analysis_is_not_cached() -> None:
    function = tf.function(layer)
    fail = [True]

    def analyse(context: OpContext) -> None:
        if fail[0]:
            raise Mine("in analysis")
        context.insert_after_op(lambda t: t * 2)

    failing_tool = tool(analyse, "Relu")
    with amanda.apply(failing_tool):
        for _ in range(2):
            with pytest.raises(Mine, match="in analysis") as caught:
                function(X, W)
            assert len(caught.value.__notes__) == 1
            assert "Relu" in caught.value.__notes__[0]
        fail[0] = False
        close(function(X, W), PLAIN[0] * 2)


def test_a_failed_analysis_of_a_backward_op() -> None:
    function = tf.function(layer)

    def analyse(context: OpContext) -> None:
        raise Mine("in analysis")

    with pytest.raises(Mine), amanda.apply(tool(analyse, "ReluGrad", backward=True)):
        outside(function)
    close(outside(function), PLAIN)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("point", ["insert_before_op", "insert_before_backward_op"])
def test_being_told_to_stop(stop: type[BaseException], point: str) -> None:
    function = tf.function(layer)

    def routine(value: Any) -> None:
        raise stop

    with pytest.raises(stop), amanda.apply(tool(lambda c: getattr(c, point)(routine), "Relu")):
        outside(function)
    close(outside(function), PLAIN)


def test_an_error_of_an_op_names_the_lines_of_the_program() -> None:
    inner = tf.function(lambda x: tf.gather(x, [7]))

    def branch(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 1e9, lambda: x, lambda: inner(tf.nn.relu(x)))

    program = tf.function(branch)

    def message() -> str:
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            program(X)
        return str(raised.value)

    expected = message()
    assert "Graph execution error" in expected
    watched = tool(lambda c: c.insert_after_op(lambda *values: None))
    for made in (watched, after("Relu", lambda v: v * 2)):
        with amanda.apply(made):
            assert message() == message() == expected


def test_an_error_that_the_program_itself_raises_is_its_own() -> None:
    function = tf.function(lambda x: tf.debugging.check_numerics(tf.math.log(x), "not a number"))
    with (
        pytest.raises(tf.errors.InvalidArgumentError, match="not a number"),
        amanda.apply(before("Log", lambda t: t * 1.0)),
    ):
        function(-tf.abs(X))


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (Edit("MatMul", "before", lambda a: (a, a), 1), RoutineResultError),
        (Edit("MatMul", "before", lambda a, b: a), RoutineResultError),
        (Edit("MatMul", "before", lambda a: "text", 1), RoutineResultError),
        (Edit("MatMul", "before", lambda a: tf.cast(a, tf.float32), 1), RoutineResultError),
        (Edit("MatMul", "before", lambda a: a, 7), PositionError),
        (Edit("Relu", "after", lambda a: a, 1), PositionError),
        (Edit("MatMul", "grad_in", lambda g: g, 2), PositionError),
        (Edit("MatMul", "grad_out", lambda g: g, 1), PositionError),
        (Edit("Relu", "replace", lambda a: None), RoutineResultError),
        (Edit("Relu", "replace", lambda a: (a, a)), RoutineResultError),
        (Edit("MatMul", "backward", lambda g: g), RoutineResultError),
        (Edit("MatMul", "grad_in", lambda g: (g, g), 1), RoutineResultError),
    ],
    ids=lambda value: getattr(value, "kind", None) or getattr(value, "__name__", None),
)
def test_wrong_requests_and_results(edit: Edit, error: type[amanda.AmandaError]) -> None:
    function = tf.function(layer)
    with pytest.raises(error) as caught, amanda.apply(editing(edit)):
        outside(function)
    assert edit.name in str(caught.value)
    close(outside(function), PLAIN)


def test_late_requests() -> None:
    function = tf.function(layer)
    late = tool(lambda c: c.insert_before_op(lambda *v: None), "Relu", require_outputs=True)
    with pytest.raises(LateActionError), amanda.apply(late):
        function(X, W)
    late = tool(lambda c: c.insert_after_op(lambda *v: None), "ReluGrad", backward=True)
    with pytest.raises(LateActionError), amanda.apply(late):
        outside(function)
    close(outside(function), PLAIN)


def test_two_replacements_are_an_error_that_names_both_tools() -> None:
    class First(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(
                lambda c: c.replace_op(lambda a: a) if c.op_type == "Relu" else None
            )

    class Second(First):
        pass

    function = tf.function(layer)
    with (
        pytest.raises(ReplacementConflictError, match=r"First and .*Second"),
        amanda.apply(First(), Second()),
    ):
        function(X, W)
    with amanda.apply(First()):
        close(function(X, W), PRODUCT)


def test_numbers_and_arrays_stand_for_tensors() -> None:
    function = tf.function(layer)
    wanted = tf.nn.relu(tf.matmul(X, W * 2)).numpy()
    with amanda.apply(before("MatMul", lambda t: t.numpy() * 2, 1)):
        close(function(X, W), wanted)
    with amanda.apply(after("Relu", lambda t: tf.Variable(t * 3))):
        close(function(X, W), PLAIN[0] * 3)
    with amanda.apply(at_inputs("MatMul", lambda g: g.numpy() * 2, 1)):
        close(outside(function)[2], PLAIN[2] * 2)


def test_the_same_tool_applied_again_raises_again() -> None:
    """The function's twin is reused."""
    tanh_fails = before("Tanh", failing)
    function = tf.function(lambda x: tf.tanh(x) * 2)
    for _ in range(3):
        with amanda.apply(tanh_fails), pytest.raises(Mine) as caught:
            function(X)
        assert len(caught.value.__notes__) == 1
        close(function(X), tf.tanh(X) * 2)
