"""Steps, modules, the order of routines, and recomputation."""

from __future__ import annotations

import pytest

from amanda_core.engine.activation import apply, step
from amanda_core.engine.calls import MODULE_OUTPUT
from amanda_core.engine.context import OpContext
from amanda_core.engine.selection import select
from amanda_core.engine.tool import Tool
from amanda_core.interface.namespace import Namespace
from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.oracle import Edits
from amanda_core.testing.kit.rig import Rig


def _double(number: float) -> float:
    return 2 * number


def _steps() -> tuple[list[str], Tool]:
    events: list[str] = []
    tool = Tool()
    tool.add_inst_for_step(lambda n: events.append(f"+{n}"), lambda n: events.append(f"-{n}"))
    return events, tool


@needs("steps")
def test_steps_end_where_the_framework_ends_them(rig: Rig) -> None:
    """Call `session.end_step()` after what ends a training step."""
    built = rig.build("chain")
    events, tool = _steps()
    with apply(tool):
        assert events == ["+0"]
        rig.backend.end_step(built.program)
        assert events == ["+0", "-0", "+1"]
        rig.backend.end_step(built.program)
    assert events == ["+0", "-0", "+1", "-1", "+2"]
    rig.backend.end_step(built.program)
    assert events == ["+0", "-0", "+1", "-1", "+2"]  # The tools were removed.


@needs("ordered")
def test_routines_run_in_program_order(rig: Rig) -> None:
    """Run an op's routines around it, and before those of an op that reads its result."""
    built = rig.build("chain")
    events: list[tuple[str, str]] = []

    def before(context: OpContext) -> None:
        common_type = context["type"]
        context.insert_before_op(lambda *_: events.append(("before", common_type)), observe=True)

    def after(context: OpContext) -> None:
        common_type = context["type"]
        context.insert_after_op(lambda *_: events.append(("after", common_type)), observe=True)

    common_types = built.model.common_types
    with apply(rig.tool(before, *common_types), rig.tool(after, *common_types, after=True)):
        for _ in range(3):
            events.clear()
            built.run()
            expected = [
                (at, common_type)
                for common_type in built.model.sequence
                for at in ("before", "after")
            ]
            assert events == expected


@needs("scopes")
def test_ops_know_the_module_that_they_run_in(rig: Rig) -> None:
    """Set `Site.module_path` to the path of the modules, from the outermost one on."""
    built = rig.build("scoped")
    paths: dict[str, str] = {}

    def analyse(context: OpContext) -> None:
        paths[context["type"]] = context.module_path

    with apply(rig.tool(analyse, *built.model.common_types)):
        outputs = built.run()
    assert rig.is_run(outputs, built)
    # Frameworks may number names; parts are joined by a mark of their own.
    one, two = paths["mul"].rindex("one"), paths["add"].rindex("two")
    # Siblings, below the module around them.
    assert paths["mul"][:one] == paths["add"][:two]
    assert paths["mul"].startswith(paths["relu"])
    assert len(paths["relu"]) <= one


@needs("scope_events")
def test_tools_hear_of_modules(rig: Rig) -> None:
    """Call `session.enter_scope` and `leave_scope` around modules if `session.watches_scopes`."""
    built = rig.build("scoped")
    events: list[tuple[str, str]] = []
    tool = Tool()
    tool.add_inst_for_scope(
        lambda path: events.append(("enter", path)), lambda path: events.append(("leave", path))
    )
    with apply(tool):
        built.run()
        first = list(events)
        built.run()
    assert [kind for kind, _ in first] == ["enter", "enter", "leave", "enter", "leave", "leave"]
    (_, outer), (_, one), (_, one_left), (_, two), (_, two_left), (_, outer_left) = first
    assert (one, two, outer) == (one_left, two_left, outer_left)
    assert "one" in one
    assert "two" in two
    assert events == first * 2


@needs("calls")
def test_calls_of_outermost_modules_are_counted(rig: Rig) -> None:
    """Call `session.calls.enter` and `leave` around outermost calls if `session.watches_calls`."""
    built = rig.build("scoped")
    events: list[tuple[str, int]] = []
    tool = Tool()
    tool.add_inst_for_call(
        lambda call: events.append(("begin", call.number)),
        lambda call: events.append(("end", call.number)),
    )
    ran: list[int] = []

    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda *values: ran.append(len(events)), observe=True)

    selected = rig.tool(analyse, "mul").where(select(calls=[1]))
    with apply(tool, selected):
        built.run()
        built.run()
        step()
        built.run()
    once = [("begin", 0), ("end", 0)]
    assert events == [*once, ("begin", 1), ("end", 1), *once]
    assert ran == [3]


@needs("module_values")
def test_values_of_modules_are_shown_and_edited(rig: Rig) -> None:
    """Add operators of the types in `amanda_core.engine.calls` for which `session.calls.shows`."""
    built = rig.build("scoped")
    shown: list[str] = []
    tool = Tool()

    def analyse(context: OpContext) -> None:
        if context.op_type == MODULE_OUTPUT:
            shown.append(context.module_path)
            context.insert_after_op(rig.edit(_double))

    tool.add_inst_for_op(analyse)
    tool.show_modules("*two*", outputs=True)
    seen: list[str] = []
    other = Tool()
    other.add_inst_for_op(lambda context: seen.append(context.op_type))
    with apply(tool, other):
        edited = built.run()
    assert len(shown) == 1
    assert MODULE_OUTPUT not in seen
    # The module returns the result of its last operator.
    assert rig.same(edited, built.expected(Edits(after={"a": _double})).outputs)


@needs("gradients", "recomputed_edits")
@pytest.mark.parametrize("position", [0, 1])
def test_what_is_recomputed_is_edited_again(rig: Rig, position: int) -> None:
    """Repeat edits in a recomputation: gradients are those of the edited run."""
    built = rig.build_recomputed("chain")
    plain = built.gradients()
    assert rig.same(plain.gradients["w"], built.expected().gradients["w"])
    with apply(rig.asking("insert_before_op", rig.edit(_double), "mul", inputs=[position])):
        found = built.gradients()
    expected = built.expected(Edits(before={("h", position): _double}))
    assert rig.same(found.outputs, expected.outputs)
    for name, gradient in expected.gradients.items():
        assert rig.same(found.gradients[name], gradient), name


@needs("gradients", "recomputed_edits", "recomputed_flag")
def test_recomputation_is_the_same_op_and_flagged(rig: Rig) -> None:
    """Pass `recomputed` to `Session.open` when an op runs again: it is the same op."""
    built = rig.build_recomputed("chain")
    executed: list[tuple[int, bool]] = []

    def analyse(context: OpContext) -> None:
        context.insert_before_op(
            lambda *values: executed.append((context.get_op_id(), context.recomputed))
        )

    with apply(rig.tool(analyse, "mul")):
        built.gradients()
    again = [flag for _, flag in executed]
    if all(Namespace.parse(name).mode == "eager" for name in rig.namespaces):
        assert len({number for number, _ in executed}) == 1
        assert again == [False, True]
    else:
        # In a graph the second run is a node, and so an op, of its own. If it does not need results
        # of the forward program, either of the two may run first.
        assert sorted(again) == [False, True]
