"""The interceptors of eager ops: which one is used, and that the native one passes what is idle."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras
import pytest
import tensorflow as tf

import amanda
import amanda_driver_tf
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import after, idle, watching, watching_backward
from amanda_driver_tf.gradients.eager import backward
from amanda_driver_tf.identity.records import Record
from amanda_driver_tf.interception import eager_operators
from amanda_driver_tf.plugin import amanda_preflight
from amanda_driver_tf.tensorflow_internals import extension
from amanda_driver_tf.tensorflow_internals.modules import backprop, execute, pywrap_tfe
from amanda_driver_tf.tensorflow_internals.versions import VARIABLE
from amanda_driver_tf.threads import STATE

from .tensors import normal, variable

X = normal(2, 3)
W = variable(3, 3)
Y = normal(3, 3)


def dense() -> Callable[[], tf.Tensor]:
    layer = keras.layers.Dense(3, activation="relu")
    layer(X)
    return lambda: tf.reduce_sum(layer(X)) + tf.reduce_sum(X @ W)


def test_the_interceptor_is_told(interceptor: str) -> None:
    assert amanda_driver_tf.interceptor().name == interceptor
    assert amanda_driver_tf.interceptor().why == f"{VARIABLE} asks for it"


#: In a process of its own: where PyTorch is imported, too, its driver would refuse it first.
OTHER_SWITCHES = """
import pytest
import tensorflow as tf
import amanda
from amanda_core.errors import DriverError
from amanda_core.runtime.switches import VERSION
from amanda_core.testing.kit.tools import after
from amanda_core.runtime.threads import THREAD

THREAD.control.switches[VERSION] += 1
refused = "Driver 'tensorflow'.*built for another version of amanda-core"
with pytest.raises(DriverError, match=refused), amanda.apply(amanda.Tool()):
    raise AssertionError("attached")
THREAD.control.switches[VERSION] -= 1
with amanda.apply(after("Relu", lambda y: y + 1)):
    assert float(tf.nn.relu(2.0)) == 3
assert float(tf.nn.relu(2.0)) == 2
"""


@pytest.mark.slow
def test_a_core_with_switches_of_another_layout_is_refused(interceptor: str) -> None:
    if interceptor != "native":
        pytest.skip("in pure Python, switches are read by name")
    subprocess.run([sys.executable, "-c", OTHER_SWITCHES], check=True)


def test_without_a_wish_the_native_interceptor_is_used_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE)
    expected = "native" if extension.native is not None else "python"
    assert amanda_driver_tf.interceptor().name == expected
    monkeypatch.setattr(extension, "native", None)
    monkeypatch.setattr(extension, "missing", "it was not built")
    assert amanda_driver_tf.interceptor() == (
        "python",
        "The native interceptor cannot be used: it was not built",
    )


def test_an_interceptor_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "other")
    with pytest.raises(UnsupportedError, match="is not the name of an interceptor"):
        amanda_driver_tf.interceptor()
    monkeypatch.setenv(VARIABLE, "native")
    monkeypatch.setattr(extension, "native", None)
    with pytest.raises(UnsupportedError, match="AMANDA_TF_INTERCEPTOR=native, but"):
        amanda_driver_tf.interceptor()


def test_the_preflight_check_tells_the_interceptor(
    interceptor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = f"Eager operators pass through the {interceptor} interceptor."
    assert amanda_preflight()[-1].message.startswith(expected)
    assert amanda_preflight()[-1].severity == "info"
    monkeypatch.setenv(VARIABLE, "other")
    assert amanda_preflight()[-1].severity == "error"
    assert "is not the name of an interceptor" in amanda_preflight()[-1].message


def test_an_extension_with_other_frames_is_not_used() -> None:
    class Site:
        answers = iter([True, True, False])

        def __init__(self, chain: Any) -> None:
            pass

        def here(self) -> bool:
            return next(self.answers)

    module = types.SimpleNamespace(CallSite=Site)
    assert not extension.knows_frames(module)
    assert not extension.knows_frames(module)
    if extension.native is not None:
        assert extension.knows_frames(extension.native)


def trained() -> Callable[[], tf.Tensor]:
    """Run a step with an op that falls back, and taped ops without any requested gradient."""
    average = variable(3)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = tf.reshape(tf.nn.relu(X @ W), [-1, 3])
            average.assign(average * 0.9 + value[0] * 0.1)
            loss = tf.reduce_sum(tf.concat([value, average[None] * 2.0], 0)[:2])
        return tape.gradient(loss, W)

    return step


@pytest.mark.parametrize("make", [dense, trained])
def test_idle_ops_run_no_python_with_the_native_interceptor(
    make: Callable[[], Callable[[], tf.Tensor]], interceptor: str
) -> None:
    replacements = (
        eager_operators.fast_path,
        eager_operators.execute_op,
        backward.gradient_function,
    )
    codes = {function.__code__ for function in replacements}
    seen: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            seen.append(frame.f_code.co_name)

    program = make()
    with amanda.apply(idle()):
        for run in range(6):
            seen.clear()
            sys.setprofile(profile)
            try:
                program()
            finally:
                sys.setprofile(None)
            assert seen or run
    assert bool(seen) == (interceptor == "python")


def test_a_gradient_that_is_asked_for_late_is_seen() -> None:
    def step(late: bool) -> None:
        with tf.GradientTape() as tape:
            value = tf.tanh(X @ W)
        if late:
            tape.gradient(value, W)

    seen, tool = watching_backward()
    with amanda.apply(tool):
        for _ in range(6):
            step(late=False)
        assert seen == []
        step(late=True)
        assert seen == [("Fill", None), ("TanhGrad", "Tanh"), ("MatMul", "MatMul")]


def test_both_interceptors_restore_what_they_replaced() -> None:
    def found() -> tuple[Any, ...]:
        return pywrap_tfe.TFE_Py_FastPathExecute, execute.execute, backprop._gradient_function

    before = found()
    with amanda.apply(idle()):
        assert not any(one is other for one, other in zip(found(), before, strict=True))
    assert found() == before


def test_another_program_in_between_and_another_line_are_seen() -> None:
    def program(turn: int) -> tf.Tensor:
        value = tf.nn.relu(X) if turn % 2 else tf.nn.relu(X @ W)
        return tf.reduce_sum(value) if turn % 3 else tf.reduce_mean(value)

    seen, tool = watching()
    expected = []
    with amanda.apply(idle()), amanda.apply(tool):
        for turn in range(12):
            expected += [] if turn % 2 else ["ReadVariableOp", "MatMul"]
            expected += ["Relu", "Sum" if turn % 3 else "Mean"]
            program(turn)
    assert seen == expected


def test_a_tool_that_comes_later_is_seen_by_ops_that_were_idle() -> None:
    program = dense()
    plain = program().numpy()
    with amanda.apply(idle()):
        for _ in range(3):
            assert program().numpy() == plain
        with amanda.apply(after("Sum", lambda value: value * 2)):
            assert program().numpy() == pytest.approx(plain * 2)
        with amanda.disabled():
            assert program().numpy() == plain
        assert program().numpy() == plain


def test_an_op_that_raises_raises_the_same() -> None:
    def program(value: Any) -> tf.Tensor:
        return tf.matmul(X, value)

    with amanda.apply(idle()):
        for _ in range(3):
            program(W)
        with pytest.raises(tf.errors.InvalidArgumentError, match="Matrix size-incompatible"):
            program(X)
        with pytest.raises(tf.errors.InvalidArgumentError, match="to be a float tensor"):
            program("text")
        program(W)
        assert STATE.fallbacks == []


@pytest.mark.slow
def test_idle_ops_keep_nothing_alive() -> None:
    program = dense()
    constant = tf.constant(1.0)

    def run() -> None:
        program()
        tf.reshape(constant, [1, 1])

    with amanda.apply(idle()):
        for _ in range(5):
            run()
        gc.collect()
        place = STATE.eager
        assert place is not None
        records = [one for one in gc.get_objects() if type(one) is Record]
        assert records
        before = [sys.getrefcount(record) for record in records]
        held = [sys.getrefcount(value) for value in (X, constant, place, None)][:3]
        for _ in range(200):
            run()
        gc.collect()
        assert [sys.getrefcount(record) for record in records] == before
        assert [sys.getrefcount(value) for value in (X, constant, place)] == held


def failing() -> None:
    # One line: what fails was idle the time before.
    for value in (Y, X):
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            tf.matmul(X, value)
    for shape in ([-1], [[1], [2, 3]]):
        with contextlib.suppress(ValueError):
            tf.reshape(X, shape)


def recorded() -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.reshape(X @ W, [-1]) ** 2)
    tape.gradient(loss, W)


def iterated() -> None:
    def parts(count: int) -> Iterator[tf.Tensor]:
        yield tf.nn.relu(X)
        if count:
            yield from parts(count - 1)

    tf.add_n(list(parts(4)))
    next(parts(3))  # Closed in the middle.


CODE = compile("for _ in range(3): tf.reshape(tf.tanh(x), [-1])", "made", "exec")


def executed() -> None:
    exec(CODE, {"tf": tf, "x": X})


def unhandled() -> None:
    # Neither converted nor executed, so the entry for the fallback is left over.
    with contextlib.suppress(ValueError):
        tf.raw_ops.MatMul(a=X, b=object())


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [dense(), trained(), failing, recorded, iterated, executed, unhandled]
)
def test_no_path_through_an_interceptor_leaks(program: Callable[[], Any]) -> None:
    def grown() -> int:
        before = sys.getallocatedblocks()
        for _ in range(40):
            program()
        gc.collect()
        return sys.getallocatedblocks() - before

    for _ in range(30):
        program()
    gc.collect()
    # TensorFlow 2.16 leaks by itself; what it frees for once does not count.
    plain = max(0, sorted(grown() for _ in range(5))[2])
    with amanda.apply(idle()):
        for _ in range(30):
            program()
        gc.collect()
        # Caches settle some day; what leaks at every op never does.
        assert any(grown() < plain + 80 for _ in range(20))


def test_threads_with_tools_of_their_own_do_not_disturb_each_other() -> None:
    program = dense()
    plain = program().numpy()
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def watched(doubled: bool) -> None:
        try:
            start.wait()
            expected = plain * 2 if doubled else plain
            tool = after("Sum", lambda value: value * 2) if doubled else idle()
            for _ in range(4):
                with amanda.apply(tool):
                    for _ in range(8):
                        assert program().numpy() == pytest.approx(expected)
                assert program().numpy() == plain
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=watched, args=(bool(index % 2),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_routine_that_raises_leaves_the_interceptor_as_it_was() -> None:
    def refuse(value: Any) -> Any:
        raise RuntimeError("refused")

    program = dense()
    plain = program().numpy()
    with amanda.apply(idle()):
        for _ in range(3):
            program()
        with amanda.apply(after("Sum", refuse)), pytest.raises(RuntimeError, match="refused"):
            program()
        for _ in range(3):
            assert program().numpy() == plain
    assert program().numpy() == plain


@pytest.mark.parametrize("wrong", [{}, {"record": object}, {"state": None, "thread": None}])
def test_an_interceptor_refuses_what_does_not_fit(wrong: dict[str, Any]) -> None:
    if extension.native is None:
        pytest.skip(f"no native interceptor: {extension.missing}")
    with pytest.raises((TypeError, AttributeError)):
        extension.native.Interceptor(**wrong)


def test_interceptors_are_used_from_the_next_session_on(
    interceptor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = dense()
    plain = program().numpy()
    other = "python" if interceptor == "native" or extension.native is None else "native"
    with amanda.apply(idle()):
        program()
        program()
        monkeypatch.setenv(VARIABLE, other)
        assert program().numpy() == plain
        assert program().numpy() == plain
    with amanda.apply(idle()):
        for _ in range(3):
            assert program().numpy() == plain
    assert os.environ[VARIABLE] == other
