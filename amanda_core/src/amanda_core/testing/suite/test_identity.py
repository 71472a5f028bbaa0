"""Which ops are seen, by which ids, and that watching them changes nothing."""

from __future__ import annotations

from amanda_core.engine.activation import apply, cache_disabled
from amanda_core.engine.tool import Tool
from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.rig import Rig


def test_each_op_is_seen_once_and_in_order(rig: Rig) -> None:
    """Execute a plan once for each execution of its op: miss none, and count none twice.

    Open a context for each op that a user would name, and none for what the op calls inside.
    Modules around ops change nothing.
    """
    models = [rig.build(name) for name in ("chain", "fork", "scoped")]
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, "mul", "add", "relu")):
        for built in models:
            built.run()
    expected = [common_type for built in models for common_type in built.model.sequence]
    assert [common_type for common_type, _ in executed] == expected


def test_a_loop_executes_its_ops_each_time(rig: Rig) -> None:
    """Count three executions of a layer that runs three times, as one op or as three."""
    built = rig.build("loop")
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, *built.model.common_types)):
        outputs = built.run()
    assert [common_type for common_type, _ in executed] == built.model.sequence
    assert rig.is_run(outputs, built)


def test_ids_stay_the_same_from_run_to_run(rig: Rig) -> None:
    """Give an op the same id in every run: make `Site.key` of what does not change.

    This holds where each execution is analysed, too.
    """
    built = rig.build("chain")
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, *built.model.common_types)):
        built.run()
        built.run()
        with cache_disabled():
            built.run()
            built.run()
    assert len(executed) == 12
    assert executed == executed[:3] * 4


def test_two_equal_ops_have_two_ids(rig: Rig) -> None:
    """Tell equal ops apart by their place in the program: put it into `Site.key`."""
    built = rig.build("twins")
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, "mul")):
        built.run()
    assert len({number for _, number in executed}) == 2


def test_readers_of_one_value_are_seen(rig: Rig) -> None:
    """See each op of a branching graph once, after the ops that it reads from."""
    built = rig.build("diamond")
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, *built.model.common_types)):
        built.run()
    assert [common_type for common_type, _ in executed] == ["mul", "relu", "add"]


def test_watching_changes_nothing(rig: Rig) -> None:
    """Keep results bit for bit under a tool that only looks."""
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
    """Write back only what a plan's step returns: None and the same object mean unchanged."""
    built = rig.build("chain")
    plain = built.run()
    common_types = sorted(built.model.common_types)
    nothing = rig.asking("insert_before_op", lambda *values: None, *common_types)
    same = rig.asking("insert_before_op", lambda *values: list(values), *common_types)
    after = rig.asking("insert_after_op", lambda *values: list(values), *common_types)
    with apply(nothing, same, after):
        outputs = built.run()
    assert outputs == plain


@needs(common_types=("matmul", "tanh"))
def test_a_matrix_product(rig: Rig) -> None:
    """See the ops of a dense layer, with the right values."""
    _sequence(rig, "dense")


@needs(common_types=("exp", "sum"))
def test_a_reduction(rig: Rig) -> None:
    """See the ops of a reduction to one number, with the right values."""
    _sequence(rig, "reduced")


def _sequence(rig: Rig, name: str) -> None:
    built = rig.build(name)
    executed: list[tuple[str, int]] = []
    with apply(rig.recording(executed, *built.model.common_types)):
        outputs = built.run()
    assert [common_type for common_type, _ in executed] == built.model.sequence
    assert rig.is_run(outputs, built)
