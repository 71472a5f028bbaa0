"""Observers in functions: nodes on control edges, for which nothing else is changed."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

import amanda
from amanda_core.testing.kit.tools import before

X = tf.constant([[0.5, -1.0], [2.0, 0.25]])


class Everywhere(amanda.Tool):
    """Observes all values and gradients of forward and backward ops.

    Args:
        look: Called with the name of an op and its values.
    """

    def __init__(self, look: Callable[..., Any] = lambda name, *values: None) -> None:
        super().__init__()
        self.look = look
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Observe an op."""
        for ask, what in (
            (context.insert_before_op, "before"),
            (context.insert_after_op, "after"),
            (context.insert_before_backward_op, "arriving"),
            (context.insert_after_backward_op, "contributed"),
        ):
            ask(self.run, observe=True, key=(context.op_type, what))

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Observe a backward op."""
        context.insert_before_backward_op(self.run, observe=True, key=(context.op_type, "raw"))
        context.insert_after_backward_op(self.run, observe=True, key=(context.op_type, "raw"))

    def run(self, *values: Any, key: tuple[str, str]) -> None:
        """Pass values to `look`."""
        self.look(key, *values)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the functions that are made while a test runs."""
    made: list[Any] = []
    original = tf_context.Context.add_function_def

    def add(self: Any, fdef: Any) -> Any:
        if fdef.signature.name.startswith("amanda_"):
            made.append(fdef)
        return original(self, fdef)

    monkeypatch.setattr(tf_context.Context, "add_function_def", add)
    return made


def test_a_function_keeps_its_signature_and_its_wiring(twins: list[Any]) -> None:
    function = tf.function(lambda x: tf.tanh(x @ x) * x)
    with tf.GradientTape() as tape:
        tape.watch(X)
        expected = function(X)
    gradient = tape.gradient(expected, X)
    with amanda.apply(Everywhere()), tf.GradientTape() as tape:
        tape.watch(X)
        found = function(X)
        second = tape.gradient(found, X)
    assert (found.numpy() == expected.numpy()).all()
    assert (second.numpy() == gradient.numpy()).all()
    assert twins
    for fdef in twins:
        names = {node.name for node in fdef.node_def if node.op == "EagerPyFunc"}
        assert names
        assert not any(node.attr["Tout"].list.type for node in fdef.node_def if node.name in names)
        assert not any("version" in argument.name for argument in fdef.signature.input_arg)
        for node in fdef.node_def:
            data = {text.split(":")[0] for text in node.input if not text.startswith("^")}
            assert not data & names
        assert not {text.split(":")[0] for text in fdef.ret.values()} & names


def test_neighbouring_routines_share_a_node(twins: list[Any]) -> None:
    tools = [before("Sin", lambda x: x / 2, 0) for _ in range(3)]
    with amanda.apply(*tools):
        y = tf.function(tf.sin)(X)
    assert (y.numpy() == tf.sin(X / 8).numpy()).all()
    (fdef,) = twins
    assert [node.op for node in fdef.node_def if "Py" in node.op] == ["EagerPyFunc"]


def test_observers_run_in_the_order_of_the_program() -> None:
    seen: list[tuple[str, str]] = []
    tool = Everywhere(lambda key, *values: seen.append(key))
    function = tf.function(lambda x: tf.exp(tf.sin(x)))
    with amanda.apply(tool), tf.GradientTape() as tape:
        tape.watch(X)
        y = function(X)
        tape.gradient(y, X)
    kept = [key for key in seen if key[0] in ("Sin", "Exp") and key[1] != "raw"]
    assert kept == [
        ("Sin", "before"),
        ("Sin", "after"),
        ("Exp", "before"),
        ("Exp", "after"),
        ("Exp", "arriving"),
        ("Exp", "contributed"),
        ("Sin", "arriving"),
        ("Sin", "contributed"),
    ]


def test_observers_see_what_edits_made() -> None:
    seen: list[Any] = []

    def look(key: tuple[str, str], *values: Any) -> None:
        if key == ("Sin", "before"):
            seen.append(values[0].numpy())

    function = tf.function(lambda x: tf.sin(x) + x)
    halved = before("Sin", lambda x: x / 2, 0)
    with amanda.apply(halved, Everywhere(look)), tf.GradientTape() as tape:
        tape.watch(X)
        y = function(X)
        gradient = tape.gradient(y, X)
    assert (seen[0] == X.numpy() / 2).all()
    assert (y.numpy() == (tf.sin(X / 2) + X).numpy()).all()
    assert abs(gradient - (tf.cos(X / 2) + 1)).numpy().max() < 1e-6


def test_what_nothing_needs_is_not_computed_for_observers() -> None:
    """A multiplication has gradients for both factors, one of which is requested."""
    seen: list[Any] = []

    def look(key: tuple[str, str], *values: Any) -> None:
        if key == ("Mul", "contributed"):
            seen.append([value is None for value in values])

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = x * y
        return tape.gradient(z, x)

    with amanda.apply(Everywhere(look)):
        step(X, X * 2)
    assert seen == [[False, True]]


def test_an_observer_that_returns_something_is_refused() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(tf.negative, observe=True))
    function = tf.function(lambda x: tf.sin(x))
    with amanda.apply(tool), pytest.raises(amanda.AmandaError, match=r"\[observer-result\]"):
        function(X)
    assert function(X).shape == (2, 2)


@pytest.mark.parametrize("staged", [False, True])
def test_observers_in_loops_and_branches(staged: bool) -> None:
    @tf.function
    def looped(x: Any) -> Any:
        for _ in tf.range(3):
            x = tf.tanh(x)
        if tf.reduce_sum(x) > 0:
            x = tf.exp(x)
        return x

    seen: list[str] = []

    def note(*values: Any) -> None:
        seen.append("called")

    tool = amanda.Tool()
    routine = amanda.staged(lambda *values: None) if staged else note
    tool.add_inst_for_op(
        lambda context: (
            context.insert_after_op(routine, observe=True) if context.op_type == "Tanh" else None
        )
    )
    expected = looped(X)
    with amanda.apply(tool):
        found = looped(X)
    assert (found.numpy() == expected.numpy()).all()
    assert len(seen) == (0 if staged else 3)
