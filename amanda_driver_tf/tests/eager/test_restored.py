"""Replaced functions are restored, however `apply` ends; other threads run without tools."""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators
# TensorFlow and Keras have no types.

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, execute, forwardprop, imperative_grad, record, tape
from tensorflow.python.framework import op_callbacks, ops

from amanda import apply, attach
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import at_inputs, before, idle, watching
from amanda_driver_tf.tensorflow_internals import eager_checks

from .tensors import equal, normal, variable
from .test_edits import gradient

_PLACES: list[tuple[Any, str]] = [
    (pywrap_tfe, "TFE_Py_FastPathExecute"),
    (execute, "execute"),
    (execute, "must_record_gradient"),
    (execute, "record_gradient"),
    (backprop, "_gradient_function"),
    (forwardprop, "_jvp_dispatch"),
    (record, "record_operation"),
    (record, "stop_recording"),
    (imperative_grad, "imperative_grad"),
    (tape, "watch"),
    (op_callbacks, "add_op_callback"),
    (op_callbacks, "remove_op_callback"),
    (keras.layers.Layer, "__call__"),
    (keras.optimizers.Optimizer, "apply"),
]

#: The packages whose code runs at operators that are executed eagerly.
OURS = tuple(
    f"amanda_driver_tf.{name}"
    for name in ("interception", "execution.eager", "gradients.eager", "identity")
)


def fingerprint() -> dict[str, Any]:
    found: dict[str, Any] = {f"{o.__name__}.{name}": getattr(o, name) for o, name in _PLACES}
    found["mark"] = vars(ops.EagerTensor).get("_amanda_source", "none")
    return found


@pytest.fixture
def found() -> Iterator[dict[str, Any]]:
    with apply(idle()):
        pass  # What stays for good, of other modes, is there now.
    before_test = fingerprint()
    yield before_test
    assert fingerprint() == before_test


def registered() -> list[str]:
    """Return the modules on the stack when TensorFlow calls an op's gradient function."""
    names: list[str] = []
    entry = ops._gradient_registry._registry["Relu"]
    key = next(key for key, value in entry.items() if callable(value))
    original = entry[key]

    def note(op: Any, grad: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None:
            names.append(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        return original(op, grad)

    entry[key] = note
    try:
        gradient(tf.nn.relu, normal(2))
    finally:
        entry[key] = original
    return names


def test_everything_differs_while_tools_are_applied(found: dict[str, Any]) -> None:
    with apply(idle()):
        applied = fingerprint()
    same = [name for name in found if applied[name] is found[name]]
    assert same == ["tensorflow.python.eager.execute.record_gradient"]


def test_gradient_function_of_the_tapes_is_put_back(found: dict[str, Any]) -> None:
    with apply(idle()):
        assert any(name.startswith(OURS) for name in registered())
    assert not any(name.startswith(OURS) for name in registered())


def test_restored_after_an_exception(found: dict[str, Any]) -> None:
    def fail(*values: Any) -> Any:
        raise RuntimeError("of the routine")

    for made in (before("Exp", fail), at_inputs("Exp", fail)):
        with pytest.raises(RuntimeError, match="of the routine"), apply(made):
            gradient(tf.exp, normal(2))
    with pytest.raises(ZeroDivisionError), apply(idle()):
        _ = 1 / 0


def test_restored_after_nesting_and_out_of_order(found: dict[str, Any]) -> None:
    with apply(idle()), apply(idle()):
        tf.exp(normal(2))
    one, two = attach(idle()), attach(idle())
    one.remove()
    tf.exp(normal(2))
    two.remove()


def test_restored_when_left_inside_a_layer(found: dict[str, Any]) -> None:
    class Leaving(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            handle.remove()
            return tf.nn.relu(x)

    handle = attach(idle())
    layer = Leaving()
    layer(normal(2))


def test_restored_when_two_threads_overlap(found: dict[str, Any]) -> None:
    entered, leave = threading.Event(), threading.Event()
    seen: list[list[str]] = []

    def other() -> None:
        mine, made = watching()
        with apply(made):
            tf.tanh(normal(2))
            entered.set()
            assert leave.wait(20)
            tf.tanh(normal(2))
        seen.append(mine)

    here, made = watching()
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(20)
    with apply(made):
        tf.exp(normal(2))
    during = fingerprint()
    tf.exp(normal(2))
    leave.set()
    thread.join()
    assert during != found
    assert here == ["Exp"]
    assert seen == [["Tanh", "Tanh"]]


def test_threads_with_tools_of_their_own_share_a_model() -> None:
    net = keras.Sequential([keras.layers.Dense(3), keras.layers.ReLU(), keras.layers.Dense(2)])
    x = normal(4, 3)
    net(x)
    kernels = [layer.kernel.value.numpy() for layer in net.layers if layer.weights]
    expected = [
        tf.matmul(tf.nn.relu(tf.matmul(x, kernels[0] * factor)), kernels[1] * factor)
        for factor in (1.0, 2.0, 3.0)
    ]
    results: dict[int, list[Any]] = {}
    start = threading.Barrier(3)

    def work(index: int) -> None:
        made = before("MatMul", lambda w: w * (index + 1.0), [1])
        start.wait(20)
        with apply(made):
            results[index] = [net(x) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(3):
        for result in results[index]:
            equal(result, expected[index])


def test_nothing_hangs_on_variables_and_tensors(found: dict[str, Any]) -> None:
    v, x = variable(2, 2), normal(1, 2)
    with apply(idle(), before("MatMul", lambda value: value * 1.0, [1])):
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.matmul(x, v)
            tape.gradient(y, [x, v])
    assert "_amanda_source" not in vars(v.handle)
    assert "_amanda_source" not in vars(x)


def test_functions_call_nothing_of_ours_once_left() -> None:
    net, x = keras.Sequential([keras.layers.Dense(2)]), normal(1, 2)
    with apply(idle()):
        net(x)
    called: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            called.add(str(frame.f_globals.get("__name__", "")))

    sys.setprofile(note)
    try:
        net(x)
        gradient(tf.exp, x)
    finally:
        sys.setprofile(None)
    assert not {name for name in called if name.startswith(OURS)}


def test_self_test_finds_nothing_here_and_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert eager_checks.problems() == []
    monkeypatch.delattr(tape, "watch")
    assert eager_checks.problems() == ["tensorflow.python.eager.tape.watch is missing"]
    with pytest.raises(UnsupportedError, match=r"tape\.watch is missing"), apply(idle()):
        pass


def test_op_callbacks_and_tools_see_the_same_operators() -> None:
    x, seen = normal(2), list[str]()

    def callback(op_type: Any, inputs: Any, attrs: Any, outputs: Any, name: Any, **_: Any) -> None:
        seen.append(op_type if isinstance(op_type, str) else op_type.decode())

    op_callbacks.add_op_callback(callback)
    try:
        with apply(before("Relu", lambda value: value * 2.0)):
            result = tf.nn.relu(x)
    finally:
        op_callbacks.remove_op_callback(callback)
    equal(result, tf.nn.relu(x * 2.0))
    assert seen.count("Relu") == 1
    plain, expected = execute.execute, tf.exp(x * 2.0)
    with apply(before("Exp", lambda value: value * 2.0)):
        op_callbacks.add_op_callback(callback)
        try:
            equal(tf.exp(x), expected)
        finally:
            op_callbacks.remove_op_callback(callback)
        equal(tf.exp(x), expected)
    assert seen.count("Exp") == 1
    assert execute.execute is plain
    with apply(before("Exp", lambda value: value * 2.0)):
        op_callbacks.add_op_callback(callback)
    try:
        # It stays on after the tools.
        assert execute.execute is execute.execute_with_callbacks
        tf.exp(x)
    finally:
        op_callbacks.remove_op_callback(callback)
    assert seen.count("Exp") == 2
    assert execute.execute is plain
