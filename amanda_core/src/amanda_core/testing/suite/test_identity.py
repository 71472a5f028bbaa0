"""Which ops there are, what they are called, and that watching them changes nothing."""

from __future__ import annotations

from amanda_core.activation import apply, cache_disabled
from amanda_core.testing.capabilities import needs
from amanda_core.testing.rig import Rig
from amanda_core.tool import Tool


def test_each_op_is_seen_once_and_in_order(rig: Rig) -> None:
    """An op executed is one execution of its plan: no op is missed, none counted twice.

    Open a context for each op that a user would name, and none for what the op calls inside.
    Modules around ops change nothing.
    """
    models = [rig.build(name) for name in ("chain", "fork", "scoped")]
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, "mul", "add", "relu")):
        for built in models:
            built.run()
    expected = [word for built in models for word in built.model.sequence]
    assert [word for word, _ in executed] == expected


def test_a_loop_executes_its_ops_each_time(rig: Rig) -> None:
    """One layer run three times executes three times, by one op or by three."""
    built = rig.build("loop")
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, *built.model.words)):
        outputs = built.run()
    assert [word for word, _ in executed] == built.model.sequence
    assert rig.is_run(outputs, built)


def test_ids_stay_the_same_from_run_to_run(rig: Rig) -> None:
    """An op has the same id in every iteration: make `Site.key` of what does not change.

    It has the same one where each execution is analysed anew, too.
    """
    built = rig.build("chain")
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, *built.model.words)):
        built.run()
        built.run()
        with cache_disabled():
            built.run()
            built.run()
    assert len(executed) == 12
    assert executed == executed[:3] * 4


def test_two_equal_ops_have_two_ids(rig: Rig) -> None:
    """Ops that only their place in the program tells apart are two ops: `Site.key` holds it."""
    built = rig.build("twins")
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, "mul")):
        built.run()
    assert len({number for _, number in executed}) == 2


def test_readers_of_one_value_are_seen(rig: Rig) -> None:
    """Each op of a graph that branches and joins is seen once, after what it reads."""
    built = rig.build("diamond")
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, *built.model.words)):
        built.run()
    assert [word for word, _ in executed] == ["mul", "relu", "add"]


def test_watching_changes_nothing(rig: Rig) -> None:
    """Results under a tool that only looks are those without tools, to the last bit."""
    built = rig.build("chain")
    plain = built.run()
    looked = Tool()
    for require_outputs in (False, True):
        looked.add_inst_for_op(lambda context: None, require_outputs=require_outputs)
    with apply(looked):
        outputs = built.run()
    assert outputs == plain
    assert rig.is_run(plain, built)


def test_routines_that_return_none_or_what_they_got_change_nothing(rig: Rig) -> None:
    """None and the same object mean unchanged: write back only what a plan's step returns."""
    built = rig.build("chain")
    plain = built.run()
    words = sorted(built.model.words)
    nothing = rig.asking("insert_before_op", lambda *values: None, *words)
    same = rig.asking("insert_before_op", lambda *values: list(values), *words)
    after = rig.asking("insert_after_op", lambda *values: list(values), *words)
    with apply(nothing, same, after):
        outputs = built.run()
    assert outputs == plain


@needs(words=("matmul", "tanh"))
def test_a_matrix_product(rig: Rig) -> None:
    """A dense layer: ops seen, values right."""
    _sequence(rig, "dense")


@needs(words=("exp", "sum"))
def test_a_reduction(rig: Rig) -> None:
    """A reduction to one number: ops seen, values right."""
    _sequence(rig, "reduced")


def _sequence(rig: Rig, name: str) -> None:
    built = rig.build(name)
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, *built.model.words)):
        outputs = built.run()
    assert [word for word, _ in executed] == built.model.sequence
    assert rig.is_run(outputs, built)
