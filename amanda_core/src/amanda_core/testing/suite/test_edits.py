"""Forward actions: what routines get, and where the values that they return are used."""

from __future__ import annotations

from typing import Any

import pytest

from amanda_core.engine.activation import apply
from amanda_core.engine.context import OpContext
from amanda_core.errors import PositionError, RoutineResultError
from amanda_core.testing.kit.models import Value
from amanda_core.testing.kit.oracle import Edits
from amanda_core.testing.kit.rig import Rig


def _double(number: float) -> float:
    return 2 * number


def _lower(number: float) -> float:
    return number - 1


def test_an_input_is_edited(rig: Rig) -> None:
    """Run the op on what insert_before_op returned, already in the run that asked for it.

    Apply the plan of `context.trigger_callback(IPoint.BEFORE_FORWARD)` to the inputs.
    """
    built = rig.build("chain")
    with apply(rig.asking("insert_before_op", rig.edit(_lower), "relu", inputs=[0])):
        first, second = built.run(), built.run()
    edits = Edits(before={("y", 0): _lower})
    assert rig.is_run(first, built, edits)
    assert second == first


def test_an_output_is_edited(rig: Rig) -> None:
    """Give what insert_after_op returned to all readers: other ops, and the program's caller.

    Apply the plan of `context.trigger_callback(IPoint.AFTER_FORWARD)` to the outputs.
    """
    built = rig.build("chain")
    with apply(rig.asking("insert_after_op", rig.edit(_double), "mul", "relu", outputs=[0])):
        first, second = built.run(), built.run()
    assert rig.is_run(first, built, Edits(after={"h": _double, "y": _double}))
    assert second == first


def test_an_output_edit_asked_for_before_the_op(rig: Rig) -> None:
    """Run insert_after_op of an analysis before the op as well as of one after it.

    The plan that `trigger_callback` returns after the op has both.
    """
    built = rig.build("chain")

    def analyse(context: OpContext) -> None:
        context.insert_after_op(rig.edit(_double), outputs=[0])

    after = rig.asking("insert_after_op", rig.edit(_lower), "add", outputs=[0])
    with apply(rig.tool(analyse, "add"), after):
        first, second = built.run(), built.run()
    assert rig.is_run(first, built, Edits(after={"a": lambda n: _lower(_double(n))}))
    assert second == first


def test_an_output_is_the_value_that_the_op_computed(rig: Rig) -> None:
    """Pass routines after an op its result, computed from the edited inputs."""
    built = rig.build("chain")
    seen: list[Value] = []
    with apply(
        rig.asking("insert_before_op", rig.edit(_lower), "relu", inputs=[0]),
        rig.asking("insert_after_op", rig.taking(seen), "relu", outputs=[0]),
    ):
        outputs = built.run()
    assert rig.same(seen, outputs)


def test_a_routine_gets_the_positions_that_it_asked_for(rig: Rig) -> None:
    """Count positions by the op's signature, and pass values in the order that was asked for."""
    built = rig.build("chain")
    seen: list[Value] = []
    with apply(rig.asking("insert_before_op", rig.taking(seen), "mul", inputs=[1, 0])):
        built.run()
    assert rig.same(seen, [[built.values["w"], built.values["x"]]])


def test_without_positions_a_routine_gets_all_inputs(rig: Rig) -> None:
    """Pass all inputs that analysis saw, operands first, if a routine names no positions."""
    built = rig.build("chain")
    counts: list[int] = []
    seen: list[list[Any]] = []

    def analyse(context: OpContext) -> None:
        counts.append(len(context.get_inputs()))
        context.insert_before_op(lambda *values: seen.append(list(values)))

    numbers: list[Value] = []
    watching = rig.asking("insert_before_op", rig.taking(numbers), "add", inputs=[0, 1])
    with apply(rig.tool(analyse, "add"), watching):
        built.run()
    assert len(counts) == 1
    assert [len(values) for values in seen] == counts
    assert counts[0] >= 2
    assert rig.same(numbers, [built.expected().operands[1][1]])


def test_an_edit_is_of_one_op_only(rig: Rig) -> None:
    """Use an edited input for its op only: other readers of the value see the original."""
    built = rig.build("diamond")
    with apply(rig.asking("insert_before_op", rig.edit(_lower), "relu", inputs=[0])):
        outputs = built.run()
    assert rig.is_run(outputs, built, Edits(before={("r", 0): _lower}))


def test_an_edited_parameter_stays_what_it_was(rig: Rig) -> None:
    """Leave an edited parameter as it was in the model and for other ops."""
    built = rig.build("tied")
    with apply(rig.asking("insert_before_op", rig.edit(_double), "mul", inputs=[1])):
        outputs = built.run()
    assert rig.is_run(outputs, built, Edits(before={("h", 1): _double}))
    assert rig.is_run(built.run(), built)


def test_several_routines_run_in_order_each_on_what_the_last_one_made(rig: Rig) -> None:
    """Execute the steps of a plan in order: tools run in the order in which they were applied."""
    built = rig.build("chain")
    lower = rig.asking("insert_before_op", rig.edit(_lower), "relu", inputs=[0])
    double = rig.asking("insert_before_op", rig.edit(_double), "relu", inputs=[0])
    with apply(lower, double):
        outputs = built.run()
    edits = Edits(before={("y", 0): lambda number: _double(_lower(number))})
    assert rig.is_run(outputs, built, edits)


def test_a_dependency_runs_first(rig: Rig) -> None:
    """Keep the order of the plan: a tool runs after the tools that it depends on."""
    built = rig.build("chain")
    lower = rig.asking("insert_after_op", rig.edit(_lower), "mul", outputs=[0])
    double = rig.asking("insert_after_op", rig.edit(_double), "mul", outputs=[0])
    double.depends_on(lower)
    with apply(double):
        outputs = built.run()
    assert rig.is_run(outputs, built, Edits(after={"h": lambda n: _double(_lower(n))}))


def test_keyword_arguments_come_by_reference(rig: Rig) -> None:
    """Pass keyword arguments by reference: the next execution sees what a tool changes in them."""
    built = rig.build("chain")
    factors = {"now": 2.0}

    def scale(value: Any, factors: dict[str, float]) -> Any:
        return rig.changed(lambda number: number * factors["now"], value)

    with apply(rig.asking("insert_after_op", scale, "mul", outputs=[0], factors=factors)):
        twice = built.run()
        factors["now"] = 4.0
        fourfold = built.run()
    assert rig.is_run(twice, built, Edits(after={"h": _double}))
    assert rig.is_run(fourfold, built, Edits(after={"h": lambda number: 4 * number}))


def test_a_wrong_number_of_results_is_an_error(rig: Rig) -> None:
    """Let the core's error about a wrong number of results leave the plan's step."""
    built = rig.build("chain")

    def wrong(left: Any, right: Any) -> Any:
        return [left, right, left]

    with (
        apply(rig.asking("insert_before_op", wrong, "mul", inputs=[0, 1])),
        pytest.raises(RoutineResultError, match="wrong"),
    ):
        built.run()
    assert rig.is_run(built.run(), built)


def test_a_position_that_does_not_exist_is_an_error(rig: Rig) -> None:
    """Pass all inputs by position to `Session.open`, so that the core can refuse others."""
    built = rig.build("chain")
    with (
        apply(rig.asking("insert_before_op", lambda value: None, "relu", inputs=[7])),
        pytest.raises(PositionError),
    ):
        built.run()
