"""Compiled programs, branches, loops, maps and recomputation under tools."""

from __future__ import annotations

from typing import Any

import pytest

from amanda_core.engine.activation import apply, disabled
from amanda_core.engine.context import OpContext
from amanda_core.engine.tool import Tool
from amanda_core.testing.kit.backend import Transformed
from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.oracle import Edits
from amanda_core.testing.kit.rig import Built, Rig

TRANSFORMATIONS = ("branch", "loop", "map", "recomputed")
DOUBLED = Edits(after={"h": lambda number: 2 * number})


def _built(rig: Rig, transformation: str) -> tuple[Built, Transformed]:
    if transformation:
        return rig.transform("chain", transformation)
    built = rig.build("chain")
    return built, Transformed(built.program)


def _doubling(rig: Rig, calls: list[Any]) -> Tool:
    def double(value: Any) -> Any:
        calls.append(1)
        # Not converted to Python, because the values of a mapped program may not be numbers.
        return rig.backend.call("add", value, value)

    return rig.asking("insert_after_op", double, "mul", outputs=[0])


def _assert_runs(rig: Rig, built: Built, given: Transformed, edits: Edits | None = None) -> None:
    if not given.backward:
        assert rig.is_run(built.run(), built, edits)
        return
    found, expected = built.gradients(), built.expected(edits)
    assert rig.same(found.outputs, expected.outputs)
    for name, gradient in expected.gradients.items():
        assert rig.same(found.gradients[name], gradient), name


@needs(optional=True)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("transformation", ["", *TRANSFORMATIONS], ids=lambda name: name or "plain")
def test_a_program_is_edited_only_while_tools_are_active(
    rig: Rig, transformation: str, warm: bool
) -> None:
    """Follow the switches at each run: what was compiled before must not decide.

    Put `session.enabled`, `caching` and `epoch` into the key of compiled programs. A framework that
    looks them up before the driver runs needs `Attachment.changed`. Each execution of an op calls
    its routines once.
    """
    built, given = _built(rig, transformation)
    calls: list[Any] = []
    if warm:
        _assert_runs(rig, built, given)
    with apply(_doubling(rig, calls)):
        for active in (True, True, False, False, True):
            calls.clear()
            if active:
                _assert_runs(rig, built, given, DOUBLED)
            else:
                with disabled():
                    _assert_runs(rig, built, given)
            assert len(calls) == given.calls * active
    calls.clear()
    _assert_runs(rig, built, given)
    assert calls == []


@needs(optional=True)
@pytest.mark.parametrize("transformation", ["", *TRANSFORMATIONS], ids=lambda name: name or "plain")
def test_a_compiled_program_is_the_plain_one_afterwards(rig: Rig, transformation: str) -> None:
    """Keep the plain compiled program for the time after apply: it is not compiled again.

    Keep the programs of tools under keys of their own.
    """
    built, given = _built(rig, transformation)
    _assert_runs(rig, built, given)
    traces = rig.backend.traces(built.program)
    if traces is None:
        pytest.skip(f"{rig.backend.title} says of no such program how often it was compiled")
    assert traces
    calls: list[Any] = []
    with apply(_doubling(rig, calls)):
        _assert_runs(rig, built, given, DOUBLED)
        once = rig.backend.traces(built.program)
        _assert_runs(rig, built, given, DOUBLED)
        assert rig.backend.traces(built.program) == once
    _assert_runs(rig, built, given)
    assert rig.backend.traces(built.program) == once
    assert len(calls) == 2 * given.calls


class _Everywhere(Tool):
    """Inserts at all points of all ops that the driver allows, and counts."""

    def __init__(self, has_gradients: bool, how: str) -> None:
        super().__init__()
        self.how = how
        self.count = 0
        for backward in (False, True) if has_gradients else (False,):
            self.add_inst_for_op(self.look, backward=backward)
        self.add_inst_for_op(self.look_after, require_outputs=True)

    def routine(self, *values: Any) -> Any:
        self.count += 1
        return list(values) if self.how == "same values" else None

    def look(self, context: OpContext) -> None:
        observe = self.how == "observers"
        if context.is_forward():
            context.insert_before_op(self.routine, observe=observe)
            context.insert_after_op(self.routine, observe=observe)
        if context.is_backward() or context.supports("aligned_gradients"):
            context.insert_before_backward_op(self.routine, observe=observe)
            context.insert_after_backward_op(self.routine, observe=observe)

    def look_after(self, context: OpContext) -> None:
        context.insert_after_op(self.routine, observe=self.how == "observers")


@needs(optional=True)
@pytest.mark.parametrize("how", ["nothing", "same values", "observers"])
def test_a_tool_at_all_points_of_all_ops_changes_nothing(rig: Rig, how: str) -> None:
    """Pass integers and random keys to tools as they are, and hide the driver's own ops.

    A value without a gradient has None. Copies and gates that a driver makes are not operators.
    """
    program = rig.backend.mixed()
    if program is None:
        pytest.skip(f"{rig.backend.title} gives the suite no program of integers and random keys")
    plain = program()
    assert program() == plain
    tool = _Everywhere("gradients" in rig.info.capabilities_in(rig.backend.mode), how)
    with apply(tool):
        assert program() == plain
        once = tool.count
        assert program() == plain
        assert tool.count == 2 * once > 0
        with disabled():
            assert program() == plain
        assert tool.count == 2 * once
    assert program() == plain
