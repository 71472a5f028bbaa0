"""Capability ``gradients``: the backward program under tools, and actions on gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from amanda_core.engine.activation import apply, disabled
from amanda_core.engine.context import OpContext
from amanda_core.engine.tool import Tool
from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.oracle import Edits, mapped
from amanda_core.testing.kit.rig import Built, Rig


def _double(number: float) -> float:
    return 2 * number


def _lower(number: float) -> float:
    return number - 1


def _triple(number: float) -> float:
    return 3 * number


def _assert_gradients(rig: Rig, built: Built, found: Any, edits: Edits | None = None) -> None:
    expected = built.expected(edits)
    assert rig.same(found.outputs, expected.outputs)
    assert set(found.gradients) == set(expected.gradients)
    for name, gradient in expected.gradients.items():
        assert rig.same(found.gradients[name], gradient), name


def _backward_tool(rig: Rig, analyse: Any, common_type: str, *, after: bool = False) -> Tool:
    """Return a tool that analyses the backward ops of forward ops of this type."""
    tool = Tool()

    def routine(context: OpContext) -> None:
        forward = context.forward
        if forward is not None and rig.is_ours(forward, [common_type]):
            analyse(context)

    tool.add_inst_for_op(routine, backward=True, require_outputs=after)
    return tool


@needs("gradients")
@pytest.mark.parametrize("name", ["chain", "diamond", "tied", "twins", "loop", "fork"])
def test_plain_gradients_are_right(rig: Rig, name: str) -> None:
    """Compute without tools the gradients that the oracle computes: this checks the backend."""
    built = rig.build(name)
    _assert_gradients(rig, built, built.gradients())


@needs("gradients")
@pytest.mark.parametrize("name", ["chain", "diamond", "tied", "twins", "loop", "fork"])
def test_watching_backward_changes_nothing(rig: Rig, name: str) -> None:
    """Keep gradients bit for bit under a tool with routines at all four points."""
    built = rig.build(name)
    plain = built.gradients()
    tool = Tool()
    for backward in (False, True):
        for require_outputs in (False, True):
            tool.add_inst_for_op(lambda context: None, backward, require_outputs)
    with apply(tool):
        found = built.gradients()
    assert found == plain


@needs("gradients")
def test_backward_ops_know_their_forward_op(rig: Rig) -> None:
    """Pass `forward` to `Session.open`: a backward context reads through to it."""
    built = rig.build("chain")
    ids: dict[str, int] = {}
    seen: Counter[str] = Counter()

    def note(context: OpContext) -> None:
        ids[context["type"]] = context.get_op_id()
        context["mark"] = context["type"]

    def look(context: OpContext) -> None:
        if context.forward is None or not rig.is_ours(context.forward, built.model.common_types):
            return
        seen[context["mark"]] += 1
        assert context.is_backward()
        assert context.get_op_id() == ids[context["mark"]]
        assert context.get_backward_op_id() is not None
        assert context.get_backward_op() is not None
        assert context.get_grad_outputs() is not None
        assert context.get_grad_inputs() is None

    tool = Tool()
    tool.add_inst_for_op(look, backward=True)
    with apply(rig.tool(note, *built.model.common_types), tool):
        found = built.gradients()
    # A sum passes its gradient on, and some frameworks need no op for that.
    assert {"mul", "relu"} <= set(seen) <= {"mul", "add", "relu"}
    _assert_gradients(rig, built, found)


@needs("gradients")
def test_backward_ids_are_stable_and_analysed_once(rig: Rig) -> None:
    """Give a backward op the same id in all runs, and analyse it once."""
    built = rig.build("chain")
    count: Counter[int | None] = Counter()
    executed: list[int | None] = []

    def analyse(context: OpContext) -> None:
        number = context.get_backward_op_id()
        count[number] += 1
        context.insert_before_backward_op(lambda *gradients: executed.append(number))

    with apply(
        *(_backward_tool(rig, analyse, common_type) for common_type in ("mul", "add", "relu"))
    ):
        built.gradients()
        once = list(executed)
        built.gradients()
    assert len(once) >= 3
    assert len(set(once)) == len(once)
    # If two do not depend on each other, either may run first.
    assert Counter(executed) == Counter(once * 2)
    assert set(count.values()) == {1}


@needs("gradients")
def test_gradients_arrive_before_and_leave_behind(rig: Rig) -> None:
    """Give a backward context the arriving gradients, and after the op the computed ones."""
    built = rig.build("chain")
    seen: list[bool] = []

    def look(context: OpContext) -> None:
        seen.append(context.get_grad_inputs() is not None)

    with apply(_backward_tool(rig, look, "relu", after=True)):
        built.gradients()
    assert seen
    assert all(seen)


@needs("gradients")
def test_a_gradient_that_arrives_at_a_backward_op_is_edited(rig: Rig) -> None:
    """Apply insert_before_backward_op on a backward context to that op's own gradients."""
    built = rig.build("chain")

    def analyse(context: OpContext) -> None:
        context.insert_before_backward_op(rig.edit(_double), grad_outputs=[0])

    with apply(_backward_tool(rig, analyse, "relu")):
        first, second = built.gradients(), built.gradients()
    _assert_gradients(rig, built, first, Edits(grad_before={"y": _double}))
    assert second == first


@needs("gradients")
def test_a_gradient_that_a_backward_op_computed_is_edited(rig: Rig) -> None:
    """Apply insert_after_backward_op on a backward context to that op's own results."""
    built = rig.build("chain")

    def analyse(context: OpContext) -> None:
        context.insert_after_backward_op(rig.edit(_double), grad_inputs=[0])

    with apply(_backward_tool(rig, analyse, "relu", after=True)):
        first, second = built.gradients(), built.gradients()
    _assert_gradients(rig, built, first, Edits(grad_after={("y", 0): _double}))
    assert second == first


@needs("gradients")
@pytest.mark.parametrize(
    ("name", "common_type", "result", "position"),
    [("chain", "relu", "y", 0), ("tied", "mul", "h", 1), ("diamond", "add", "y", 1)],
)
def test_an_edited_input_lets_gradients_straight_through(
    rig: Rig, name: str, common_type: str, result: str, position: int
) -> None:
    """Differentiate at the edited input, and send its gradient to where the original came from."""
    built = rig.build(name)
    with apply(rig.asking("insert_before_op", rig.edit(_lower), common_type, inputs=[position])):
        first, second = built.gradients(), built.gradients()
    _assert_gradients(rig, built, first, Edits(before={(result, position): _lower}))
    assert second == first


@needs("gradients")
@pytest.mark.parametrize("name", ["chain", "diamond", "tied"])
def test_an_edited_output_lets_gradients_straight_through(rig: Rig, name: str) -> None:
    """Give readers the edited output, and take its gradient for that of the original."""
    built = rig.build(name)
    with apply(rig.asking("insert_after_op", rig.edit(_double), "mul", outputs=[0])):
        first, second = built.gradients(), built.gradients()
    _assert_gradients(rig, built, first, Edits(after={"h": _double}))
    assert second == first


class OfTheUser(Exception):
    """An exception type that no framework knows."""


@needs("gradients")
def test_an_exception_in_backward_keeps_its_type(rig: Rig) -> None:
    """Raise it from backward or from the run around it, and keep the next run complete."""
    built = rig.build("chain")
    fails = iter([True])

    def fail_first(*gradients: Any) -> None:
        if next(fails, False):
            raise OfTheUser("once")

    def analyse(context: OpContext) -> None:
        context.insert_before_backward_op(fail_first)

    with apply(_backward_tool(rig, analyse, "relu")):
        with pytest.raises(OfTheUser) as caught:
            built.gradients()
        found = built.gradients()
    assert "fail_first" in "\n".join(getattr(caught.value, "__notes__", ()))
    _assert_gradients(rig, built, found)


@needs("gradients")
def test_backward_is_disabled_too(rig: Rig) -> None:
    """Run backward ops plain inside disabled(), and edited again outside of it."""
    built = rig.build("chain")

    def analyse(context: OpContext) -> None:
        context.insert_before_backward_op(rig.edit(_double), grad_outputs=[0])

    with apply(_backward_tool(rig, analyse, "relu")):
        with disabled():
            _assert_gradients(rig, built, built.gradients())
        found = built.gradients()
    _assert_gradients(rig, built, found, Edits(grad_before={"y": _double}))
    _assert_gradients(rig, built, built.gradients())


# Capability ``aligned_gradients``.


@needs("gradients", "aligned_gradients")
@pytest.mark.parametrize(
    ("name", "common_type", "result"),
    [("chain", "add", "a"), ("diamond", "mul", "h"), ("fork", "mul", "h"), ("tied", "mul", "h")],
)
def test_the_whole_gradient_of_an_output(
    rig: Rig, name: str, common_type: str, result: str
) -> None:
    """Pass as grad_outputs of a forward op the sum of what all readers of the output send."""
    built = rig.build(name)
    seen: list[Any] = []
    with apply(
        rig.asking("insert_before_backward_op", rig.taking(seen), common_type, grad_outputs=[0])
    ):
        found = built.gradients()
    assert rig.same(seen, [built.expected().arriving[result]])
    _assert_gradients(rig, built, found)


@needs("gradients", "aligned_gradients")
@pytest.mark.parametrize(
    ("name", "common_type", "result", "position"),
    [
        ("chain", "mul", "h", 1),
        ("diamond", "relu", "r", 0),
        ("diamond", "add", "y", 1),
        ("tied", "mul", "h", 1),
        ("tied", "add", "y", 1),
    ],
)
def test_an_ops_contribution_to_the_gradient_of_an_input(
    rig: Rig, name: str, common_type: str, result: str, position: int
) -> None:
    """Pass as grad_inputs of a forward op its own part, before other readers' parts are added."""
    built = rig.build(name)
    seen: list[Any] = []
    with apply(
        rig.asking(
            "insert_after_backward_op", rig.taking(seen), common_type, grad_inputs=[position]
        )
    ):
        found = built.gradients()
    assert rig.same(seen, [built.expected().contributions[result, position]])
    _assert_gradients(rig, built, found)


@needs("gradients", "aligned_gradients")
@pytest.mark.parametrize(
    ("name", "common_type", "result"),
    [("chain", "add", "a"), ("diamond", "mul", "h"), ("fork", "mul", "h")],
)
def test_the_gradient_of_an_output_is_edited(
    rig: Rig, name: str, common_type: str, result: str
) -> None:
    """Run the op's backward program on the whole gradient as the routine returned it."""
    built = rig.build(name)
    with apply(
        rig.asking("insert_before_backward_op", rig.edit(_double), common_type, grad_outputs=[0])
    ):
        first, second = built.gradients(), built.gradients()
    _assert_gradients(rig, built, first, Edits(grad_before={result: _double}))
    assert second == first


@needs("gradients", "aligned_gradients")
@pytest.mark.parametrize(
    ("name", "common_type", "result", "position"),
    [
        ("chain", "mul", "h", 1),
        ("diamond", "add", "y", 0),
        ("diamond", "add", "y", 1),
        ("tied", "mul", "h", 1),
        ("tied", "add", "y", 1),
    ],
)
def test_a_contribution_is_edited(
    rig: Rig, name: str, common_type: str, result: str, position: int
) -> None:
    """Change one op's part of an input's gradient, and no other reader's part."""
    built = rig.build(name)
    with apply(
        rig.asking(
            "insert_after_backward_op", rig.edit(_double), common_type, grad_inputs=[position]
        )
    ):
        first, second = built.gradients(), built.gradients()
    _assert_gradients(rig, built, first, Edits(grad_after={(result, position): _double}))
    assert second == first


@needs("gradients", "aligned_gradients")
def test_edits_of_values_and_gradients_together(rig: Rig) -> None:
    """Edit a value and its gradient together: a masked weight, as in pruning, and a scaled one."""
    built = rig.build("chain")
    with apply(
        rig.asking("insert_before_op", rig.edit(_lower), "mul", inputs=[1]),
        rig.asking("insert_after_backward_op", rig.edit(_double), "mul", grad_inputs=[1]),
        rig.asking("insert_before_backward_op", rig.edit(_lower), "relu", grad_outputs=[0]),
    ):
        found = built.gradients()
    edits = Edits(
        before={("h", 1): _lower}, grad_after={("h", 1): _double}, grad_before={"y": _lower}
    )
    _assert_gradients(rig, built, found, edits)


@needs("gradients", "aligned_gradients")
def test_several_routines_on_one_gradient_run_in_order(rig: Rig) -> None:
    """Run routines on one gradient in the order in which the tools were applied."""
    built = rig.build("chain")
    with apply(
        rig.asking("insert_before_backward_op", rig.edit(_lower), "add", grad_outputs=[0]),
        rig.asking("insert_before_backward_op", rig.edit(_double), "add", grad_outputs=[0]),
    ):
        found = built.gradients()
    _assert_gradients(rig, built, found, Edits(grad_before={"a": lambda n: _double(_lower(n))}))


@needs("gradients", "aligned_gradients", "late_gradients")
def test_gradients_are_asked_for_once_the_op_has_run(rig: Rig) -> None:
    """Accept requests for gradients after the op has run, already for this execution."""
    built = rig.build("chain")

    def analyse(context: OpContext) -> None:
        context.insert_before_backward_op(rig.edit(_double), grad_outputs=[0])

    with apply(rig.tool(analyse, "relu", after=True)):
        found = built.gradients()
    _assert_gradients(rig, built, found, Edits(grad_before={"y": _double}))


# Capability ``replace_backward``.


@needs("gradients", "replace_backward")
def test_the_backward_program_of_an_op_is_replaced(rig: Rig) -> None:
    """Use what replace_backward_op on a forward context returns as the inputs' gradients."""
    built = rig.build("chain")

    def backward(gradient: Any) -> Any:
        return rig.changed(_triple, gradient)

    with apply(rig.asking("replace_backward_op", backward, "relu", grad_outputs=[0])):
        first, second = built.gradients(), built.gradients()
    _assert_gradients(rig, built, first, Edits(backward={"y": lambda g: [mapped(_triple, g)]}))
    assert second == first
    _assert_gradients(rig, built, built.gradients())


@needs("gradients", "replace_backward")
def test_the_backward_program_of_an_op_of_two_inputs_is_replaced(rig: Rig) -> None:
    """Expect one gradient for each input, in the order of the signature."""
    built = rig.build("tied")

    def backward(gradient: Any) -> Any:
        return gradient, rig.changed(_triple, gradient)

    with apply(rig.asking("replace_backward_op", backward, "mul", grad_outputs=[0])):
        found = built.gradients()
    _assert_gradients(rig, built, found, Edits(backward={"h": lambda g: [g, mapped(_triple, g)]}))


@needs("gradients", common_types=("matmul", "tanh"))
def test_gradients_of_a_matrix_product(rig: Rig) -> None:
    """Send the gradients of a dense layer with an edited weight straight through."""
    built = rig.build("dense")
    with apply(rig.asking("insert_before_op", rig.edit(_lower), "matmul", inputs=[1])):
        found = built.gradients()
    _assert_gradients(rig, built, found, Edits(before={("h", 1): _lower}))
