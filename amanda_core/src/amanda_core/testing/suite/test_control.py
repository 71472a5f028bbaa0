"""Switches, nesting, handles, threads: where tools are active, and where not."""

from __future__ import annotations

import threading
from typing import Any

from amanda_core.activation import apply, attach, disabled, enabled
from amanda_core.testing.models import Value
from amanda_core.testing.oracle import Edits
from amanda_core.testing.rig import Rig
from amanda_core.tool import Tool


def _double(number: float) -> float:
    return 2 * number


def _lower(number: float) -> float:
    return number - 1


def _doubling(rig: Rig) -> Tool:
    return rig.asking("insert_after_op", rig.edit(_double), "mul", outputs=[0])


DOUBLED = Edits(after={"h": _double})


def test_disabled_and_enabled(rig: Rig) -> None:
    """Inside disabled() the program is the plain one, inside enabled() in it the edited one.

    Ask `session.enabled` before each execution.
    """
    built = rig.build("chain")
    with apply(_doubling(rig)):
        assert rig.is_run(built.run(), built, DOUBLED)
        with disabled():
            assert rig.is_run(built.run(), built)
            with enabled():
                assert rig.is_run(built.run(), built, DOUBLED)
            assert rig.is_run(built.run(), built)
        assert rig.is_run(built.run(), built, DOUBLED)


def test_disabled_from_the_beginning(rig: Rig) -> None:
    """An op that ran first while tools were disabled is analysed when they are not."""
    built = rig.build("chain")
    with apply(_doubling(rig)):
        with disabled():
            assert rig.is_run(built.run(), built)
        assert rig.is_run(built.run(), built, DOUBLED)


def test_a_nested_tool_runs_after_the_outer_one_and_only_inside(rig: Rig) -> None:
    """One session for both; plans are of one epoch, so watch `session.epoch`."""
    built = rig.build("chain")
    lowering = rig.asking("insert_after_op", rig.edit(_lower), "mul", outputs=[0])
    both = Edits(after={"h": lambda number: _double(_lower(number))})
    with apply(lowering):
        alone = built.run()
        with apply(_doubling(rig)):
            assert rig.is_run(built.run(), built, both)
        assert built.run() == alone
    assert rig.is_run(alone, built, Edits(after={"h": _lower}))


def test_a_handle_is_removed_once(rig: Rig) -> None:
    """attach() holds until remove(), which may be called again, and before that of newer tools.

    Plans are of one epoch, so watch `session.epoch`.
    """
    built = rig.build("chain")
    first = attach(rig.asking("insert_after_op", rig.edit(_lower), "mul", outputs=[0]))
    second = attach(_doubling(rig))
    try:
        both = Edits(after={"h": lambda number: _double(_lower(number))})
        assert rig.is_run(built.run(), built, both)
        first.remove()
        assert rig.is_run(built.run(), built, DOUBLED)
        first.remove()
        assert rig.is_run(built.run(), built, DOUBLED)
    finally:
        first.remove()
        second.remove()
    assert rig.is_run(built.run(), built)
    second.remove()
    assert rig.is_run(built.run(), built)


def test_tools_are_applied_one_after_the_other(rig: Rig) -> None:
    """A driver attaches and detaches any number of times, each time for other tools."""
    built = rig.build("chain")
    lowering = rig.asking("insert_after_op", rig.edit(_lower), "mul", outputs=[0])
    for _ in range(2):
        with apply(_doubling(rig)):
            assert rig.is_run(built.run(), built, DOUBLED)
        with apply(lowering):
            assert rig.is_run(built.run(), built, Edits(after={"h": _lower}))
    assert rig.is_run(built.run(), built)


def test_a_model_built_while_tools_are_applied(rig: Rig) -> None:
    """Models made inside apply are as good as those made before it."""
    with apply(_doubling(rig)):
        built = rig.build("chain")
        outputs = built.run()
    assert rig.is_run(outputs, built, DOUBLED)
    assert rig.is_run(built.run(), built)


def test_operators_inside_a_routine_are_not_instrumented(rig: Rig) -> None:
    """A routine may call the framework: ask `session.enabled`, which is False inside routines."""
    built = rig.build("chain")
    calls: list[Any] = []

    def compute(value: Any) -> None:
        calls.append(rig.backend.to_python(rig.backend.call("mul", value, value)))
        # Without end, were it instrumented.
        assert len(calls) < 5

    executed: list[tuple[str, int]] = []
    with apply(
        rig.asking("insert_before_op", compute, "mul", inputs=[0]),
        rig.recording(executed, "mul"),
    ):
        built.run()
    x = built.values["x"]
    assert rig.same(calls, [_squared(x)])
    assert len(executed) == 1


def _squared(value: Value) -> Value:
    if isinstance(value, list):
        return [_squared(item) for item in value]
    return value * value


def test_other_threads_run_as_without_tools(rig: Rig) -> None:
    """Tools are for the thread that applied them: what others of the user's run is left alone."""
    built = rig.build("chain")
    outputs: list[Any] = []
    with apply(_doubling(rig)):
        thread = threading.Thread(target=lambda: outputs.append(built.run()))
        thread.start()
        thread.join()
        assert rig.is_run(built.run(), built, DOUBLED)
    assert len(outputs) == 1
    assert rig.is_run(outputs[0], built)
