"""Forward actions: what routines get, and that what they return takes effect, there alone."""

from __future__ import annotations

from typing import Any

import pytest

from amanda_core.activation import apply
from amanda_core.context import OpContext
from amanda_core.errors import PositionError, RoutineResultError
from amanda_core.testing.models import Value
from amanda_core.testing.oracle import Edits
from amanda_core.testing.rig import Rig


def _double(number: float) -> float:
    return 2 * number


def _lower(number: float) -> float:
    return number - 1


def test_an_input_is_edited(rig: Rig) -> None:
    """The op runs on what insert_before_op returned, in the very run in which it was asked for.

    Fold `context.trigger_callback(IPoint.BEFORE_FORWARD)` over the inputs.
    """
    built = rig.build("chain")
    with apply(rig.asking("insert_before_op", rig.edit(_lower), "relu", inputs=[0])):
        first, second = built.run(), built.run()
    edits = Edits(before={("y", 0): _lower})
    assert rig.is_run(first, built, edits)
    assert second == first


def test_an_output_is_edited(rig: Rig) -> None:
    """Readers get what insert_after_op returned: other ops, and who called the program.

    Fold `context.trigger_callback(IPoint.AFTER_FORWARD)` over the outputs.
    """
    built = rig.build("chain")
    with apply(rig.asking("insert_after_op", rig.edit(_double), "mul", "relu", outputs=[0])):
        first, second = built.run(), built.run()
    assert rig.is_run(first, built, Edits(after={"h": _double, "y": _double}))
    assert second == first


def test_an_output_edit_asked_for_before_the_op(rig: Rig) -> None:
    """An analysis before the op may ask for insert_after_op, beside one behind the op.

    The plan that `trigger_callback` returns behind the op has both.
    """
    built = rig.build("chain")

    def analyse(context: OpContext) -> None:
        context.insert_after_op(rig.edit(_double), outputs=[0])

    behind = rig.asking("insert_after_op", rig.edit(_lower), "add", outputs=[0])
    with apply(rig.tool(analyse, "add"), behind):
        first, second = built.run(), built.run()
    assert rig.is_run(first, built, Edits(after={"a": lambda n: _lower(_double(n))}))
    assert second == first


def test_an_output_is_the_value_that_the_op_computed(rig: Rig) -> None:
    """A routine after an op gets its result, computed on what routines before it made."""
    built = rig.build("chain")
    seen: list[Value] = []
    with apply(
        rig.asking("insert_before_op", rig.edit(_lower), "relu", inputs=[0]),
        rig.asking("insert_after_op", rig.taking(seen), "relu", outputs=[0]),
    ):
        outputs = built.run()
    assert rig.same(seen, outputs)


def test_a_routine_gets_the_positions_that_it_asked_for(rig: Rig) -> None:
    """Positions are those of the op's signature, in the order in which they were asked for."""
    built = rig.build("chain")
    seen: list[Value] = []
    with apply(rig.asking("insert_before_op", rig.taking(seen), "mul", inputs=[1, 0])):
        built.run()
    assert rig.same(seen, [[built.values["w"], built.values["x"]]])


def test_without_positions_a_routine_gets_all_inputs(rig: Rig) -> None:
    """The operands come first, and what the analysis saw as inputs is what the routine gets."""
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
    """A value with two readers, edited for one of them, stays what it was for the other."""
    built = rig.build("diamond")
    with apply(rig.asking("insert_before_op", rig.edit(_lower), "relu", inputs=[0])):
        outputs = built.run()
    assert rig.is_run(outputs, built, Edits(before={("r", 0): _lower}))


def test_an_edited_parameter_stays_what_it_was(rig: Rig) -> None:
    """A parameter edited for one op is the old one for others, and in the model afterwards."""
    built = rig.build("tied")
    with apply(rig.asking("insert_before_op", rig.edit(_double), "mul", inputs=[1])):
        outputs = built.run()
    assert rig.is_run(outputs, built, Edits(before={("h", 1): _double}))
    assert rig.is_run(built.run(), built)


def test_several_routines_run_in_order_each_on_what_the_last_one_made(rig: Rig) -> None:
    """Tools run in the order in which they were applied: execute all steps of a plan in order."""
    built = rig.build("chain")
    lower = rig.asking("insert_before_op", rig.edit(_lower), "relu", inputs=[0])
    double = rig.asking("insert_before_op", rig.edit(_double), "relu", inputs=[0])
    with apply(lower, double):
        outputs = built.run()
    edits = Edits(before={("y", 0): lambda number: _double(_lower(number))})
    assert rig.is_run(outputs, built, edits)


def test_a_dependency_runs_first(rig: Rig) -> None:
    """A tool's routines see what the tools that it depends on made: take the order of the plan."""
    built = rig.build("chain")
    lower = rig.asking("insert_after_op", rig.edit(_lower), "mul", outputs=[0])
    double = rig.asking("insert_after_op", rig.edit(_double), "mul", outputs=[0])
    double.depends_on(lower)
    with apply(double):
        outputs = built.run()
    assert rig.is_run(outputs, built, Edits(after={"h": lambda n: _double(_lower(n))}))


def test_keyword_arguments_come_by_reference(rig: Rig) -> None:
    """What a tool changes in an object that it passed on is seen at the next execution."""
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
    """The core raises it in the plan's step; let it out as it is."""
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
    """Give all inputs by position to `Session.open`, and the core knows what is too far."""
    built = rig.build("chain")
    with (
        apply(rig.asking("insert_before_op", lambda value: None, "relu", inputs=[7])),
        pytest.raises(PositionError),
    ):
        built.run()
