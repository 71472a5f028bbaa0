"""If the driver itself fails at an operator, it raises, or the program continues without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import tensorflow as tf

import amanda
from amanda_driver_tf.execution.eager.execute import Run
from amanda_driver_tf.execution.functions.mode import FunctionMode
from amanda_driver_tf.execution.sessions.mode import GraphMode
from amanda_driver_tf.gradients.eager.taped import Taped
from amanda_driver_tf.identity.places import Forward
from amanda_driver_tf.interception import eager_operators
from amanda_driver_tf.operators.op_types import OpType


class Look(amanda.Tool):
    """Look at every value."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.look)
        context.insert_after_op(self.look)
        if context.op_type == "Mul":
            context.insert_before_backward_op(self.look, grad_outputs=[0])

    def look(self, *values: Any) -> None: ...


def broken(*_: Any, **__: Any) -> Any:
    raise LookupError("a fault in the driver")


def broken_once(original: Any) -> Any:
    """Return a function that fails at its first call."""
    failures = iter([broken])

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return next(failures, original)(*args, **kwargs)

    return call


def eager() -> list[Any]:
    """Write a variable, draw random numbers, and differentiate."""
    variable = tf.Variable([1.0, 2.0])
    variable.assign_add([1.0, 1.0])
    tf.random.set_seed(3)
    drawn = tf.random.uniform([2])  # A state of TensorFlow's: to draw twice draws another number.
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * variable * drawn)
    gradient = tape.gradient(loss, variable).numpy()
    return [variable.numpy(), loss.numpy(), gradient, tf.random.uniform([2]).numpy()]


def function() -> list[Any]:
    """Call a function."""
    double = tf.function(lambda x: tf.nn.relu(x) * 2)
    return [double(tf.constant([-1.0, 2.0])).numpy()]


def session() -> list[Any]:
    """Run a graph in a session."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as running:
        return [running.run(tf.nn.relu(tf.constant([-1.0, 2.0])) * 2)]


#: Where the fault lies -> the program, and the object and attribute that is replaced.
FAULTS: dict[str, tuple[Callable[[], list[Any]], Any, str]] = {
    "eager, finding the site": (eager, Forward, "_look_up"),
    "eager, dtypes of arguments": (eager, OpType, "disagree"),
    "eager, falling back": (eager, eager_operators, "is_plain"),
    "eager, gradients before": (eager, Taped, "_fold"),
    "eager, before the op": (eager, Run, "_analyse"),
    "eager, after the op": (eager, Run, "_record_on_tapes"),
    "function": (function, FunctionMode, "_twin"),
    "session": (session, GraphMode, "_translation"),
}


@pytest.mark.parametrize("once", [False, True], ids=["always", "once"])
@pytest.mark.parametrize("name", FAULTS)
def test_program_goes_on_and_nothing_is_executed_twice(
    name: str, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, owner, attribute = FAULTS[name]
    plain = program()
    fault = broken_once(getattr(owner, attribute)) if once else broken
    monkeypatch.setattr(owner, attribute, fault)
    with amanda.apply(Look(), on_driver_error="skip") as handle:
        results = program()
        coverage = handle.coverage()["tensorflow"]
    assert all(map(numpy.array_equal, results, plain))
    assert any("a fault in the driver" in left_out.why for left_out in coverage)


@pytest.mark.parametrize("name", FAULTS)
def test_error_says_that_it_is_the_drivers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, owner, attribute = FAULTS[name]
    monkeypatch.setattr(owner, attribute, broken)
    with pytest.raises(LookupError, match="a fault in the driver") as caught, amanda.apply(Look()):
        program()
    assert any("error of Amanda's driver" in note for note in caught.value.__notes__)
