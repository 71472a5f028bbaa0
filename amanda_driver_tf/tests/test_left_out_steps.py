"""Steps that a tool's selection leaves out: they run as if no tool acted anywhere."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# TensorFlow has no types.

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda

#: Steps that are left out: what runs from the second of a row on is what would run from then on.
LEFT_OUT = [*range(2, 6), *range(8, 12)]
PLACES = {
    "before": ("insert_before_op", {}),
    "observed before": ("insert_before_op", {"observe": True}),
    "after": ("insert_after_op", {}),
    "gradients of outputs": ("insert_before_backward_op", {}),
    "gradients of inputs": ("insert_after_backward_op", {}),
    "raw backward": ("insert_after_backward_op", {}),
}


class Every(amanda.Tool):
    """Has a routine at one place of every op."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.name, self.options = PLACES[place]
        self.add_inst_for_op(self.analyse, backward=place == "raw backward")

    def analyse(self, context: amanda.OpContext) -> None:
        getattr(context, self.name)(self.run, **self.options)

    def run(self, *values: Any) -> None:
        """Do nothing."""


def model(layers: int) -> Callable[[], Any]:
    """Return a training step of a model with so many layers."""
    weights = [tf.Variable(tf.ones((4, 4))) for _ in range(layers)]

    def step() -> Any:
        with tf.GradientTape() as tape:
            y = tf.ones((2, 4))
            for weight in weights:
                y = tf.tanh(y @ weight) + 1.0
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, weights)

    return step


def in_function(layers: int) -> Callable[[], Any]:
    return tf.function(model(layers))  # type: ignore[no-any-return]


def in_session(layers: int) -> Callable[[], Any]:
    with tf.Graph().as_default() as graph:
        weights = [tf.constant(1.0, shape=(4, 4)) for _ in range(layers)]
        y = tf.ones((2, 4))
        for weight in weights:
            y = tf.tanh(y @ weight) + 1.0
        gradients = tf.gradients(tf.reduce_sum(y), weights[:1])
    session = tf.compat.v1.Session(graph=graph)
    return lambda: session.run(gradients[0])


def calls_of_amanda(step: Callable[[], Any]) -> Counter[str]:
    """Return how often a step calls each function of Amanda's."""
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("amanda_"):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def left_out(step: Callable[[], Any], tool: amanda.Tool, ends: bool) -> list[Counter[str]]:
    """Return what the settled ones of the steps that are left out call."""
    step()
    found = []
    with amanda.apply(tool):
        for number in range(12):
            calls = calls_of_amanda(step)
            if ends:
                amanda.step()
            if number in (4, 10):
                found.append(calls)
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", [in_function, in_session])
def test_what_they_cost_does_not_depend_on_the_number_of_operators(mode: Any, place: str) -> None:
    tool = Every(place).where(~amanda.select(steps=LEFT_OUT))
    small, large = (left_out(mode(layers), tool, ends=False) for layers in (2, 9))
    assert small == large
    assert sum(large[0].values()) < 100


@pytest.mark.parametrize("place", PLACES)
def test_eager_operators_run_as_if_no_tool_selected_them(place: str) -> None:
    steps = left_out(model(3), Every(place).where(~amanda.select(steps=LEFT_OUT)), ends=True)
    nowhere = left_out(model(3), Every(place).where(amanda.select(op="no such op")), ends=True)
    assert steps == nowhere
    everywhere = left_out(model(3), Every(place), ends=True)
    assert sum(everywhere[0].values()) > 2 * sum(steps[0].values())
