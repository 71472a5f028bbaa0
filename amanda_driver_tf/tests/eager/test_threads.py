"""Tools for all threads of a program, eagerly and in functions, and what threads were not seen."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_driver_tf.interception import eager_operators, function_calls, session_runs

X = tf.ones((1, 4))


class Calls(amanda.Tool):
    """Counts executions by readable name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.count, inputs=[], observe=True, name=context.name)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.count, observe=True, name=context.name)

    def count(self, *values: Any, name: str) -> None:
        self.calls[name] += 1


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for module in (eager_operators, function_calls, session_runs):
        assert not module.PATCHES._users


def layer() -> Any:
    dense = tf.keras.layers.Dense(4, name="dense")
    dense(X)
    return dense


def function() -> Any:
    dense = layer()
    made = tf.function(lambda x: tf.nn.relu(dense(x)))
    made(X)
    return made


def session() -> Any:
    graph = tf.Graph()
    with graph.as_default():
        given = tf.compat.v1.placeholder(tf.float32, (1, 4))
        result = tf.nn.relu(given * 2.0)
    runner = tf.compat.v1.Session(graph=graph)
    return lambda x: runner.run(result, {given: [[1.0, 2.0, 3.0, 4.0]]})


@pytest.mark.parametrize("make", [layer, function, session])
def test_every_thread_is_instrumented(make: Callable[[], Any]) -> None:
    run, alone, tool = make(), Calls(), Calls()
    with amanda.apply(alone):
        run(X)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: run(X), range(6)))  # Before the tools.
        with amanda.apply(tool, threads="all"):
            run(X)
            list(threads.map(lambda _: run(X), range(20)))
            thread = threading.Thread(target=run, args=(X,))
            thread.start()
            thread.join()
        list(threads.map(lambda _: run(X), range(6)))
    assert tool.calls == {name: 22 * count for name, count in alone.calls.items()}
    assert tool.not_seen() == []


@pytest.mark.parametrize("make", [layer, function, session])
def test_without_it_results_say_so(make: Callable[[], Any]) -> None:
    run, tool = make(), Calls()

    def start() -> None:
        with amanda.apply(tool):
            thread = threading.Thread(target=run, args=(X,), name="other")
            thread.start()
            thread.join()

    with pytest.warns(amanda.AmandaWarning, match="thread 'other' run without"):
        start()
    assert not tool.calls
    assert "thread 'other'" in tool.not_seen()[0]


def test_gradients_in_threads() -> None:
    dense, alone, tool = layer(), Calls(), Calls()

    def train() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense(X) ** 2)
        assert len(tape.gradient(loss, dense.trainable_variables)) == 2

    with amanda.apply(alone):
        train()
    with amanda.apply(tool, threads="all"):
        for _ in range(3):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
    assert tool.calls == {name: 3 * count for name, count in alone.calls.items()}


def test_keras_predicts_in_a_thread() -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, name="dense")])
    model.compile(loss="mse")
    model.predict(tf.ones((4, 4)), verbose=0)
    tool = Calls()
    with amanda.apply(tool, threads="all"):
        thread = threading.Thread(
            target=lambda: model.predict(tf.ones((8, 4)), batch_size=2, verbose=0)
        )
        thread.start()
        thread.join()
    products = [count for name, count in tool.calls.items() if "MatMul" in name]
    assert products == [4]


def test_python_that_tensorflow_calls_is_part_of_an_op() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def run(x: Any) -> Any:
        return tf.py_function(lambda y: tf.nn.relu(y) * 2.0, [x], tf.float32)

    run(X)
    tool = Calls()
    with amanda.apply(tool, threads="all"):
        run(X)
    assert "EagerPyFunc" in tool.calls
    assert tool.not_seen() == []
