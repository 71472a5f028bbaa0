"""When analysis routines run, and what they find in a context."""

from __future__ import annotations

from collections import Counter
from typing import Any

from amanda_core.engine.activation import apply, cache_disabled, cache_enabled
from amanda_core.engine.context import OpContext
from amanda_core.testing.kit.oracle import Edits
from amanda_core.testing.kit.rig import Rig


def _counting(count: Counter[str], rig: Rig) -> Any:
    return rig.tool(lambda context: count.update([context["type"]]), "mul", "add", "relu")


def test_analysis_runs_once_an_op(rig: Rig) -> None:
    """Analyse an op only at its first execution while the cache is on.

    `context.trigger_callback` does this. Use one key, and so one context, for all executions.
    """
    built = rig.build("chain")
    count: Counter[str] = Counter()
    with apply(_counting(count, rig)):
        for _ in range(3):
            built.run()
    assert count == {"mul": 1, "add": 1, "relu": 1}


def test_analysis_runs_each_time_without_the_cache(rig: Rig) -> None:
    """Analyse each execution under cache_disabled: keep no plan unless `session.caching`."""
    built = rig.build("chain")
    count: Counter[str] = Counter()
    with apply(_counting(count, rig)):
        built.run()
        with cache_disabled():
            built.run()
            built.run()
        built.run()
    assert count == {"mul": 3, "add": 3, "relu": 3}


def test_the_cache_can_be_enabled_again(rig: Rig) -> None:
    """Use the cache again under cache_enabled inside cache_disabled."""
    built = rig.build("chain")
    count: Counter[str] = Counter()
    with cache_disabled(), apply(_counting(count, rig)), cache_enabled():
        built.run()
        built.run()
    assert count == {"mul": 1, "add": 1, "relu": 1}


def test_what_analysis_asked_for_is_forgotten_without_the_cache(rig: Rig) -> None:
    """Without the cache, follow the plan of the execution's own analysis only."""
    built = rig.build("chain")
    amounts = iter([2.0, 3.0])

    def analyse(context: OpContext) -> None:
        amount = next(amounts)
        context.insert_after_op(rig.edit(lambda number: number * amount), outputs=[0])

    with cache_disabled(), apply(rig.tool(analyse, "mul")):
        first, second = built.run(), built.run()
    assert rig.is_run(first, built, Edits(after={"h": lambda number: 2 * number}))
    assert rig.is_run(second, built, Edits(after={"h": lambda number: 3 * number}))


def test_an_invalidated_tool_is_asked_again(rig: Rig) -> None:
    """Analyse again after `tool.invalidate()`: compare `session.epoch` before you use a plan."""
    built = rig.build("chain")
    amounts = iter([2.0, 3.0])

    def analyse(context: OpContext) -> None:
        amount = next(amounts)
        context.insert_after_op(rig.edit(lambda number: number * amount), outputs=[0])

    tool = rig.tool(analyse, "mul")
    with apply(tool):
        first = built.run()
        tool.invalidate()
        second, third = built.run(), built.run()
    assert rig.is_run(first, built, Edits(after={"h": lambda number: 2 * number}))
    assert rig.is_run(second, built, Edits(after={"h": lambda number: 3 * number}))
    assert third == second


def test_a_routine_registered_later_runs(rig: Rig) -> None:
    """Run routines that are added while a tool is applied, also at ops that had no plan."""
    built = rig.build("chain")
    count: Counter[str] = Counter()
    tool = rig.tool(lambda context: None, "mul")
    with apply(tool):
        built.run()
        tool.add_inst_for_op(
            lambda context: (
                count.update([context["type"]]) if rig.is_ours(context, ["mul"]) else None
            )
        )
        built.run()
        built.run()
    assert count == {"mul": 1}


def test_tools_applied_again_resume(rig: Rig) -> None:
    """Reuse analysis and plans when the same tools are applied again."""
    built = rig.build("chain")
    count: Counter[str] = Counter()

    def analyse(context: OpContext) -> None:
        count.update([context["type"]])
        context.insert_after_op(rig.edit(lambda number: 2 * number), outputs=[0])

    tool = rig.tool(analyse, "mul")
    for _ in range(2):
        with apply(tool):
            outputs = built.run()
        assert rig.is_run(outputs, built, Edits(after={"h": lambda number: 2 * number}))
    assert count == {"mul": 1}


def test_inputs_before_and_outputs_behind(rig: Rig) -> None:
    """Give a context its inputs before the op, and also its outputs after it.

    Pass the inputs to `Session.open`, and call `context.fill(outputs=...)` after the op has run.
    """
    built = rig.build("chain")
    before: list[tuple[bool, bool]] = []
    after: list[tuple[int, bool]] = []

    def look_before(context: OpContext) -> None:
        before.append((len(context.get_inputs()) >= 2, context.get_outputs() is None))

    def look_after(context: OpContext) -> None:
        after.append((len(context.get_outputs()), context.get_inputs() is not None))

    with apply(rig.tool(look_before, "mul"), rig.tool(look_after, "mul", after=True)):
        built.run()
    assert before == [(True, True)]
    assert after == [(1, True)]
