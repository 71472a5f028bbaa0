"""Marks in functions: nodes that record when they ran, without Python."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# TensorFlow has no types.

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.driver_kit.marks import Marks
from amanda_driver_tf.insertion import host_functions, observers
from amanda_driver_tf.interceptor_choice import INTERCEPTORS
from amanda_driver_tf.tensorflow_internals import extension

X = tf.constant([[0.5, -1.0], [2.0, 0.25]])

native = pytest.mark.skipif(
    INTERCEPTORS.choice().name != "native" or not hasattr(extension.native, "Journal"),
    reason="without the native extension, and outside of Linux, Python records marks",
)


class Marking(amanda.Tool):
    """Marks each op before and after, forward and backward; ``n`` and ``-n`` belong to one op."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        super().__init__()
        self.names: list[str] = [""]
        self.taken: list[tuple[int, int, int]] = []
        self.marks = Marks(self.take, clock)
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def number(self, context: amanda.OpContext) -> int:
        """Return a number for an op."""
        self.names.append(context.name)
        return len(self.names) - 1

    def analyse(self, context: amanda.OpContext) -> None:
        """Mark an op."""
        number = self.number(context)
        context.insert_before_op(self.marks.note, observe=True, number=number)
        context.insert_after_op(self.marks.note, observe=True, number=-number)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Mark a backward op."""
        number = self.number(context)
        context.insert_before_backward_op(self.marks.note, observe=True, number=number)
        context.insert_after_backward_op(self.marks.note, observe=True, number=-number)

    def take(self) -> None:
        """Take the marks."""
        self.taken += self.marks.take()

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return how often the ops of each name began and ended."""
        self.take()
        found: dict[str, tuple[int, int]] = dict.fromkeys(self.names[1:], (0, 0))
        for number, _, _ in self.taken:
            began, ended = found[self.names[abs(number)]]
            began, ended = began + (number > 0), ended + (number < 0)
            found[self.names[abs(number)]] = began, ended
        return found


def program(x: Any) -> Any:
    """Return a loop, a branch and ops that TensorFlow's optimizer removes."""

    def body(i: Any, y: Any) -> Any:
        return i + 1, tf.cond(i % 2 == 0, lambda: tf.tanh(y @ x), lambda: tf.sin(y) * 1.0)

    _, y = tf.while_loop(lambda i, y: i < 5, body, (tf.constant(0), x))
    y = tf.reshape(tf.reshape(y, [4]), [2, 2])
    return tf.reduce_sum(y * y)


def train(function: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = function(X)
    return y.numpy(), tape.gradient(y, X).numpy()


def by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "mark_of", lambda *arguments: None)


def test_marks_are_those_that_python_would_record(monkeypatch: pytest.MonkeyPatch) -> None:
    function = tf.function(program)
    expected = train(function)
    with amanda.apply(tool := Marking()):
        found = train(function)
    by_python(monkeypatch)
    with amanda.apply(reference := Marking()):
        train(function)
    assert (found[0] == expected[0]).all()
    assert (found[1] == expected[1]).all()
    assert tool.counts() == reference.counts()
    assert any(began > 4 for began, _ in tool.counts().values())


def test_an_op_ends_after_it_began_and_what_it_needs_before() -> None:
    function = tf.function(lambda x: tf.exp(tf.sin(x)))
    begin = time.perf_counter_ns()
    with amanda.apply(tool := Marking()):
        function(X)
    end = time.perf_counter_ns()
    tool.take()
    order = [(tool.names[abs(number)], number > 0) for number, _, _ in tool.taken]
    assert order[:4] == [("Sin", True), ("Sin", False), ("Exp", True), ("Exp", False)]
    times = [at for _, at, _ in tool.taken]
    assert begin < times[0]
    assert times == sorted(times)
    assert times[-1] < end
    assert all(thread > 0 for _, _, thread in tool.taken)


@native
def test_no_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    original = host_functions.HostFunction.__call__

    def call(self: Any, *arguments: Any) -> Any:
        calls.append(self)
        return original(self, *arguments)

    monkeypatch.setattr(host_functions.HostFunction, "__call__", call)
    function = tf.function(program)
    with amanda.apply(tool := Marking()):
        train(function)
    assert calls == []
    assert tool.counts()
    # With a clock of its own, a tool must get the times of that one.
    with amanda.apply(other := Marking(lambda: 3)):
        function(X)
    assert calls != []
    other.take()
    assert {at for _, at, _ in other.taken} == {3}


def test_what_ran_before_an_error_is_marked() -> None:
    function = tf.function(lambda x: tf.sin(tf.debugging.check_numerics(tf.exp(x), "no")))
    with amanda.apply(tool := Marking()), pytest.raises(tf.errors.InvalidArgumentError):
        function(X * 1000)
    counts = tool.counts()
    assert counts["Exp"] == (1, 1)
    assert counts["CheckNumerics"] == (1, 0)


@native
def test_many_marks_are_taken_while_a_function_runs() -> None:
    function = tf.function(
        lambda: tf.while_loop(lambda i: i < 40_000, lambda i: [i + 1], [tf.constant(0)])
    )
    threads: set[int] = set()

    class Taking(Marking):
        def take(self) -> None:
            threads.add(threading.get_ident())
            super().take()

    with amanda.apply(tool := Taking()):
        function()
        assert len(tool.taken) > 1 << 16
    assert sum(sum(pair) for pair in tool.counts().values()) == len(tool.taken)


def test_marks_beside_other_observers_keep_the_order_of_tools() -> None:
    seen: list[str] = []

    class Looking(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            context.insert_before_op(self.look, observe=True)

        def look(self, *values: Any) -> None:
            seen.append("look")
            assert not any(value is None for value in values)

    function = tf.function(tf.sin)
    with amanda.apply(tool := Marking(), Looking()):
        function(X)
    assert seen
    assert tool.counts()["Sin"] == (1, 1)
    assert len(tool.counts()) == len(seen)
