"""Switches, nesting, handles and threads: where tools are active."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from amanda_core.engine.activation import apply, attach, disabled, enabled
from amanda_core.engine.tool import Tool
from amanda_core.errors import AmandaWarning
from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.models import Value
from amanda_core.testing.kit.oracle import Edits
from amanda_core.testing.kit.rig import Rig


def _double(number: float) -> float:
    return 2 * number


def _lower(number: float) -> float:
    return number - 1


def _doubling(rig: Rig) -> Tool:
    return rig.asking("insert_after_op", rig.edit(_double), "mul", outputs=[0])


DOUBLED = Edits(after={"h": _double})


def test_disabled_and_enabled(rig: Rig) -> None:
    """Run the plain program inside disabled(), and the edited one inside enabled() within it.

    Check `session.enabled` before each execution.
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
    """Analyse an op that first ran while tools were disabled as soon as they are enabled."""
    built = rig.build("chain")
    with apply(_doubling(rig)):
        with disabled():
            assert rig.is_run(built.run(), built)
        assert rig.is_run(built.run(), built, DOUBLED)


def test_a_nested_tool_runs_after_the_outer_one_and_only_inside(rig: Rig) -> None:
    """Run a nested tool after the outer one, and only inside: watch `session.epoch`.

    Both share a session, and a plan holds for one epoch.
    """
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
    """Keep the tools of attach() until remove(), even if newer tools are still attached.

    A plan holds for one epoch, so watch `session.epoch`. A second remove() does nothing.
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
    """Attach and detach any number of times, for other tools each time."""
    built = rig.build("chain")
    lowering = rig.asking("insert_after_op", rig.edit(_lower), "mul", outputs=[0])
    for _ in range(2):
        with apply(_doubling(rig)):
            assert rig.is_run(built.run(), built, DOUBLED)
        with apply(lowering):
            assert rig.is_run(built.run(), built, Edits(after={"h": _lower}))
    assert rig.is_run(built.run(), built)


def test_a_model_built_while_tools_are_applied(rig: Rig) -> None:
    """Instrument models built inside apply like those built before it."""
    with apply(_doubling(rig)):
        built = rig.build("chain")
        outputs = built.run()
    assert rig.is_run(outputs, built, DOUBLED)
    assert rig.is_run(built.run(), built)


def test_operators_inside_a_routine_are_not_instrumented(rig: Rig) -> None:
    """Check `session.enabled`, which is False inside routines: they may call the framework."""
    built = rig.build("chain")
    calls: list[Any] = []

    def compute(value: Any) -> None:
        calls.append(rig.backend.to_python(rig.backend.call("mul", value, value)))
        # This would not end if it were instrumented.
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
    """Instrument the thread that applied the tools, and leave the user's other threads alone."""
    built = rig.build("chain")
    outputs: list[Any] = []
    with apply(_doubling(rig)):
        thread = threading.Thread(target=lambda: outputs.append(built.run()))
        thread.start()
        thread.join()
        assert rig.is_run(built.run(), built, DOUBLED)
    assert len(outputs) == 1
    assert rig.is_run(outputs[0], built)


@needs("threads")
def test_tools_for_all_threads_reach_each_of_them(rig: Rig) -> None:
    """Instrument threads that began before and after the tools, until these are removed."""
    built = rig.build("chain")
    outputs: list[Any] = []

    def run() -> None:
        outputs.append(built.run())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()
        with apply(_doubling(rig), threads="all"):
            pool.submit(run).result()
            for _ in range(2):
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
        pool.submit(run).result()
    before, *during, after = outputs
    assert rig.is_run(before, built)
    assert rig.is_run(after, built)
    assert all(rig.is_run(output, built, DOUBLED) for output in during)
    assert len(during) == 3


@needs("threads")
def test_an_account_is_the_same_in_all_threads(rig: Rig) -> None:
    """Give an op one id in all threads, and tell the tool what a thread that was left out ran."""
    built = rig.build("chain")
    executed: list[tuple[str, int]] = []
    tool = rig.recording(executed)

    def run() -> None:
        built.run()

    with apply(tool, threads="all"):
        for _ in range(3):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    assert len(executed) == 3 * len(set(executed))
    assert tool.not_seen() == []

    def leave_out() -> None:
        thread = threading.Thread(target=run, name="left out")
        thread.start()
        thread.join()

    with (
        apply(tool),
        pytest.warns(AmandaWarning, match="thread 'left out' run without tools"),
    ):
        leave_out()
    assert "thread 'left out'" in tool.not_seen()[0]
