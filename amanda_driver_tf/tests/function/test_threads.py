"""Functions that several threads call, with tools and without."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import at_inputs, before

from .handwritten_programs import W, X, half, layer


def outside(program: Callable[..., Any], w: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch(w)
        y = program(X, w)
    return [y.numpy(), tape.gradient(y, w).numpy()]


PLAIN, WANTED = outside(layer, W), outside(layer, half(W))


def same(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def in_threads(*works: Callable[[], None]) -> None:
    """Run functions concurrently and raise the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait(30)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("traced", [False, True])
def test_tools_of_one_thread_do_not_reach_another(traced: bool) -> None:
    function = tf.function(layer)
    if traced:
        outside(function, W)

    def watched() -> None:
        for _ in range(5):
            with amanda.apply(before("MatMul", half, 1)):
                for _ in range(3):
                    same(outside(function, W), WANTED)

    def plain() -> None:
        for _ in range(40):
            same(outside(function, W), PLAIN)

    in_threads(watched, plain, watched, plain)


def test_eight_threads_with_tools_of_their_own() -> None:
    functions = [tf.function(layer) for _ in range(2)]

    def work(number: int) -> Callable[[], None]:
        factor = float(number + 1)
        wanted = outside(layer, W * factor)

        def run() -> None:
            with amanda.apply(before("MatMul", lambda t: t * factor, 1)):
                for turn in range(6):
                    same(outside(functions[turn % 2], W), wanted)

        return run

    in_threads(*(work(number) for number in range(8)))


def test_eight_threads_with_the_same_tool() -> None:
    function = tf.function(layer)
    calls: list[int] = []

    def counted(value: Any) -> Any:
        calls.append(1)
        return half(value)

    shared = before("MatMul", counted, 1)

    def run() -> None:
        with amanda.apply(shared):
            for _ in range(5):
                same(outside(function, W), WANTED)

    in_threads(*[run] * 8)
    assert len(calls) == 40


def test_a_gradient_computed_in_another_thread_belongs_to_the_forward_run() -> None:
    function = tf.function(layer)
    found: list[Any] = []
    with amanda.apply(before("MatMul", half, 1), at_inputs("MatMul", lambda g: g * 3, 1)):
        with tf.GradientTape() as tape:
            tape.watch(W)
            y = function(X, W)
        in_threads(lambda: found.append(tape.gradient(y, W)))
    np.testing.assert_allclose(found[0], WANTED[1] * 3, rtol=1e-9)


def test_errors_stay_in_their_thread() -> None:
    function = tf.function(layer)

    class Mine(Exception):
        pass

    def fails() -> None:
        def failing(value: Any) -> Any:
            raise Mine

        for _ in range(10):
            with pytest.raises(Mine), amanda.apply(before("MatMul", failing, 1)):
                function(X, W)

    def works() -> None:
        with amanda.apply(before("MatMul", half, 1)):
            for _ in range(20):
                same(outside(function, W), WANTED)

    in_threads(fails, works, fails, works)


def test_routines_of_parallel_branches_run_one_after_the_other() -> None:
    inside = [0]
    most = [0]

    def routine(value: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.001)  # Others may run meanwhile, where they are let.
        inside[0] -= 1

    function = tf.function(lambda x: tf.add_n([tf.sin(x * float(i)) for i in range(64)]))
    with amanda.apply(before("Sin", routine)):
        function(X)
    assert most == [1]


def test_threads_of_tensorflow_keep_what_python_has_for_them() -> None:
    """Otherwise each call of a routine would make it again, which takes as long as the call."""
    local, found = threading.local(), set[tuple[int, bool]]()

    class Looking(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(lambda context: context.insert_before_op(self.look, observe=True))

        def look(self, *values: Any) -> None:
            known = hasattr(local, "known")
            local.known = True
            pair = threading.get_ident(), known
            assert known or pair not in found, "made again in the same thread"
            found.add(pair)

    function = tf.function(lambda x: tf.sin(tf.exp(tf.tanh(x))) + 1.0)
    with amanda.apply(Looking()):
        for _ in range(20):
            function(tf.ones(3))
    assert any(known for _, known in found)
