"""Capability ``observers``: routines that only look, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from amanda_core.engine.activation import apply
from amanda_core.engine.context import OpContext
from amanda_core.errors import ObserverResultError
from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.oracle import Edits
from amanda_core.testing.kit.rig import Rig


def _double(number: float) -> float:
    return 2 * number


def _lower(number: float) -> float:
    return number - 1


@needs("observers")
def test_an_observer_sees_inputs_and_outputs(rig: Rig) -> None:
    """Pass an observer what any routine at that point gets, and keep the run plain."""
    built = rig.build("chain")
    before: list[Any] = []
    after: list[Any] = []
    with apply(
        rig.asking("insert_before_op", rig.taking(before), "mul", inputs=[1, 0], observe=True),
        rig.asking("insert_after_op", rig.taking(after), "mul", outputs=[0], observe=True),
    ):
        outputs = built.run()
    assert outputs == rig.build("chain").run()
    assert rig.same(before, [[built.values["w"], built.values["x"]]])
    assert rig.same(after, [dict(built.expected().results)["h"]])


@needs("observers")
def test_an_observer_stands_between_edits(rig: Rig) -> None:
    """Show an observer what earlier routines returned, and not what later ones return."""
    built = rig.build("chain")
    seen: list[Any] = []
    with apply(
        rig.asking("insert_after_op", rig.edit(_lower), "relu", outputs=[0]),
        rig.asking("insert_after_op", rig.taking(seen), "relu", outputs=[0], observe=True),
        rig.asking("insert_after_op", rig.edit(_double), "relu", outputs=[0]),
    ):
        outputs = built.run()
    assert rig.is_run(outputs, built, Edits(after={"y": lambda n: _double(_lower(n))}))
    lowered = built.expected(Edits(after={"y": _lower})).outputs
    assert rig.same(seen, lowered)


@needs("observers")
def test_an_observer_runs_each_time(rig: Rig) -> None:
    """Run an observer at each execution, like any other step of the plan."""
    built = rig.build("loop")
    once: list[Any] = []
    twice: list[Any] = []
    with apply(rig.asking("insert_before_op", rig.taking(once), "mul", inputs=[0], observe=True)):
        built.run()
    with apply(rig.asking("insert_before_op", rig.taking(twice), "mul", inputs=[0], observe=True)):
        built.run()
        built.run()
    assert once
    assert rig.same(twice, once + once)


@needs("observers")
def test_an_observer_that_returns_something_is_an_error(rig: Rig) -> None:
    """Let the core's error about a returned value leave the plan's step."""
    built = rig.build("chain")

    def wrong(value: Any) -> Any:
        return value

    with (
        apply(rig.asking("insert_before_op", wrong, "relu", inputs=[0], observe=True)),
        pytest.raises(ObserverResultError, match="wrong"),
    ):
        built.run()
    assert rig.is_run(built.run(), built)


@needs("gradients", "aligned_gradients", "observers")
@pytest.mark.parametrize("name", ["chain", "diamond", "tied", "twins", "fork"])
def test_observers_at_gradients_change_nothing(rig: Rig, name: str) -> None:
    """Keep outputs and gradients bit for bit under observers of gradients."""
    built = rig.build(name)
    plain = built.gradients()
    seen: list[Any] = []

    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda *values: None, observe=True)
        context.insert_after_op(lambda *values: None, observe=True)
        context.insert_before_backward_op(lambda *grads: seen.append(grads), observe=True)
        context.insert_after_backward_op(lambda *grads: seen.append(grads), observe=True)

    with apply(rig.tool(analyse, "mul", "add", "relu")):
        found = built.gradients()
    assert found == plain
    assert seen


@needs("gradients", "aligned_gradients", "observers")
def test_an_observer_sees_the_gradients_of_an_op(rig: Rig) -> None:
    """Show the gradients of an op's outputs before its backward, of its inputs after it."""
    built = rig.build("chain")
    edited: list[Any] = []
    arrived: list[Any] = []
    made: list[Any] = []
    by_edits = [
        rig.asking("insert_before_backward_op", rig.taking(edited), "mul", grad_outputs=[0]),
        rig.asking("insert_after_backward_op", rig.taking(edited), "mul", grad_inputs=[1]),
    ]
    with apply(*by_edits):
        built.gradients()
    with apply(
        rig.asking(
            "insert_before_backward_op", rig.taking(arrived), "mul", grad_outputs=[0], observe=True
        ),
        rig.asking(
            "insert_after_backward_op", rig.taking(made), "mul", grad_inputs=[1], observe=True
        ),
    ):
        built.gradients()
    assert rig.same([*arrived, *made], edited)
