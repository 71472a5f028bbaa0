"""Exceptions of routines: they keep their type, and end only the run."""

from __future__ import annotations

from typing import Any

import pytest

from amanda_core.engine.activation import apply
from amanda_core.engine.context import OpContext
from amanda_core.testing.kit.oracle import Edits
from amanda_core.testing.kit.rig import Rig


class OfTheUser(Exception):
    """An exception type that no framework knows."""


def _double(number: float) -> float:
    return 2 * number


def _failing_once() -> Any:
    fails = iter([True])

    def fail_first(*values: Any) -> None:
        if next(fails, False):
            raise OfTheUser("once")

    return fail_first


def test_an_exception_of_a_routine_keeps_its_type_and_says_where(rig: Rig) -> None:
    """Raise it from the program's own call, with the core's note of tool, routine and op.

    Let it pass, or keep it by `session.defer` and raise it by `session.raise_pending`.
    """
    built = rig.build("chain")
    routine = _failing_once()
    with (
        apply(rig.asking("insert_before_op", routine, "add")),
        pytest.raises(OfTheUser) as caught,
    ):
        built.run()
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    assert "fail_first" in notes
    assert "insert_before_op" in notes
    assert "op " in notes


def test_a_session_survives_an_exception_of_a_routine(rig: Rig) -> None:
    """Drop what a failed run left behind: the next run is complete, and plans still hold."""
    built = rig.build("chain")
    doubling = rig.asking("insert_after_op", rig.edit(_double), "mul", outputs=[0])
    with apply(doubling, rig.asking("insert_after_op", _failing_once(), "add")):
        with pytest.raises(OfTheUser):
            built.run()
        outputs = built.run()
    assert rig.is_run(outputs, built, Edits(after={"h": _double}))
    assert rig.is_run(built.run(), built)


def test_a_failed_analysis_is_not_taken_for_a_done_one(rig: Rig) -> None:
    """Cache no plan of an analysis that raised: the next execution analyses again."""
    built = rig.build("chain")
    fails = iter([True])

    def analyse(context: OpContext) -> None:
        if next(fails, False):
            raise OfTheUser("once")
        context.insert_after_op(rig.edit(_double), outputs=[0])

    with apply(rig.tool(analyse, "mul")):
        with pytest.raises(OfTheUser):
            built.run()
        outputs = built.run()
    assert rig.is_run(outputs, built, Edits(after={"h": _double}))


def test_an_exception_that_leaves_apply_takes_the_tools_along(rig: Rig) -> None:
    """Restore the framework in `Attachment.detach`, which runs however apply is left."""
    built = rig.build("chain")
    before = dict(rig.backend.found())
    doubling = rig.asking("insert_after_op", rig.edit(_double), "mul", outputs=[0])
    with (
        pytest.raises(OfTheUser),
        apply(doubling, rig.asking("insert_before_op", _failing_once(), "relu")),
    ):
        built.run()
    assert rig.is_run(built.run(), built)
    after = rig.backend.found()
    assert [name for name in before if after.get(name) is not before[name]] == []
