"""Backward actions: the raw view of a backward context, and the aligned view of a forward one."""

from __future__ import annotations

from typing import Any

import pytest

import amanda
from amanda_core import OpContext
from amanda_core.engine.session import Session
from amanda_core.errors import AmandaWarning
from amanda_core.testing.toy import framework as toy

from .making import session_of, tool

pytestmark = pytest.mark.usefixtures("driver")


def only(op_type: str, analyse: Any) -> Any:
    """Return an analysis routine for one type of op."""
    return lambda context: analyse(context) if context.op_type == op_type else None


# Raw.


def test_one_forward_op_may_have_several_backward_ops() -> None:
    seen: list[tuple[str, str, bool]] = []

    def analyse(context: OpContext) -> None:
        seen.append((context.get_op().name, context.get_backward_op().name, context.is_backward()))

    with amanda.apply(tool(only("BiasBackward", analyse), backward=True)) as handle:
        toy.backward(toy.linear(toy.Value(2.0), toy.parameter(3.0), toy.Value(1.0)))
        backward = [c for c in session_of(handle).contexts() if c.is_backward() and c.forward]
    assert seen == [("linear", "BiasBackward", True)]
    assert [c.op_type for c in backward] == ["BiasBackward", "ProductBackward"]
    assert len({c.get_op_id() for c in backward}) == 1
    assert len({c.get_backward_op_id() for c in backward}) == 2


def test_raw_insert_before_edits_the_gradients_of_one_backward_op() -> None:
    def analyse(context: OpContext) -> None:
        context.insert_before_backward_op(lambda g: g * 10, grad_outputs=[0])

    x, w, b = toy.parameter(2.0), toy.parameter(3.0), toy.parameter(1.0)
    with amanda.apply(tool(only("ProductBackward", analyse), backward=True)):
        toy.backward(toy.linear(x, w, b))
    assert (x.grad, w.grad, b.grad) == (30.0, 20.0, 1.0)


def test_raw_insert_after_edits_the_results_of_one_backward_op() -> None:
    def analyse(context: OpContext) -> None:
        assert context.get_grad_inputs() == [3.0, 2.0]
        context.insert_after_backward_op(lambda g: g + 0.5, grad_inputs=[1])

    x, w = toy.parameter(2.0), toy.parameter(3.0)
    with amanda.apply(tool(only("ProductBackward", analyse), backward=True, require_outputs=True)):
        toy.backward(toy.linear(x, w))
    assert (x.grad, w.grad) == (3.0, 2.5)


def test_raw_replacement_stands_for_one_backward_op() -> None:
    def analyse(context: OpContext) -> None:
        context.replace_backward_op(lambda g: (g * 100, g * 200))

    x, w, b = toy.parameter(2.0), toy.parameter(3.0), toy.parameter(1.0)
    with amanda.apply(tool(only("ProductBackward", analyse), backward=True)):
        toy.backward(toy.linear(x, w, b))
    assert (x.grad, w.grad, b.grad) == (100.0, 200.0, 1.0)


def test_a_backward_op_without_forward_op_is_its_own_op() -> None:
    seen: list[OpContext] = []

    def analyse(context: OpContext) -> None:
        assert context.get_op() is context.get_backward_op()
        assert context.get_op_id() == context.get_backward_op_id()
        assert context.get_op().__name__ == "AccumulateGrad"
        assert context.get_inputs() is None
        assert context["type"] is None
        seen.append(context)

    w = toy.parameter(3.0)
    with amanda.apply(tool(only("AccumulateGrad", analyse), backward=True)):
        for _ in range(2):
            toy.backward(toy.relu(w))
    (context,) = seen
    assert context.forward is None
    assert w.grad == 2.0


def test_a_forward_context_shares_its_keys_with_its_backward_contexts() -> None:
    both = tool(lambda c: c.update(mask=0.0))
    both.add_inst_for_op(
        only(
            "ProductBackward",
            lambda c: c.insert_after_backward_op(
                lambda g, mask: g * mask, grad_inputs=[1], mask=c["mask"]
            ),
        ),
        backward=True,
        require_outputs=True,
    )
    x, w = toy.parameter(2.0), toy.parameter(3.0)
    with amanda.apply(both):
        toy.backward(toy.linear(x, w))
    assert (x.grad, w.grad) == (3.0, 0.0)


# Aligned.


def test_aligned_grad_outputs_are_the_whole_gradient_arriving_at_an_output() -> None:
    got: list[float] = []

    def analyse(context: OpContext) -> None:
        context.insert_before_backward_op(lambda g: got.append(g), grad_outputs=[0])

    w = toy.parameter(3.0)
    with amanda.apply(tool(only("linear", analyse))):
        for _ in range(2):
            y = toy.linear(toy.Value(2.0), w)
            toy.backward(toy.add(y, toy.mul(y, toy.Value(4.0))))
    assert got == [1.0 + 4.0] * 2
    assert w.grad == 2 * 2.0 * 5.0


def test_aligned_grad_inputs_are_this_ops_contribution_before_others_are_added() -> None:
    got: list[float] = []

    def analyse(context: OpContext) -> None:
        def scale(g: float) -> float:
            got.append(g)
            return g * 10

        context.insert_after_backward_op(scale, grad_inputs=[1])

    w = toy.parameter(3.0)
    with amanda.apply(tool(only("linear", analyse))):
        toy.backward(toy.add(toy.linear(toy.Value(2.0), w), toy.mul(w, toy.Value(7.0))))
    assert got == [2.0]
    assert w.grad == 2.0 * 10 + 7.0


def test_aligned_positions_are_those_of_the_forward_op_however_many_backward_ops_it_has() -> None:
    # The raw order of `linear` is (product, bias) and (x, w); the aligned one is x, w, b.
    got: list[tuple[Any, ...]] = []
    x, w, b = toy.parameter(2.0), toy.parameter(3.0), toy.parameter(1.0)
    aligned = tool(
        only("linear", lambda c: c.insert_after_backward_op(lambda *g: got.append(g))),
        require_outputs=True,
    )
    with amanda.apply(aligned):
        toy.backward(toy.linear(x, w, b), 5.0)
    assert got == [(15.0, 10.0, 5.0)]


def test_aligned_gradient_of_one_of_several_outputs() -> None:
    x = toy.parameter(3.0)
    with amanda.apply(
        tool(
            only(
                "pair", lambda c: c.insert_before_backward_op(lambda g: g * 100, grad_outputs=[1])
            ),
            require_outputs=True,
        )
    ):
        first, second = toy.pair(x)
        toy.backward(toy.add(first, second))
    assert x.grad == 1.0 + 2.0 * 100


def test_aligned_gradient_of_a_list_is_one_position() -> None:
    got: list[Any] = []
    a, b = toy.parameter(1.0), toy.parameter(2.0)

    def swap(gradients: list[float]) -> list[float]:
        got.append(list(gradients))
        return [0.0, gradients[1]]

    with amanda.apply(
        tool(only("total", lambda c: c.insert_after_backward_op(swap, grad_inputs=[0])))
    ):
        toy.backward(toy.total([a, b]), 4.0)
    assert got == [[4.0, 4.0]]
    assert (a.grad, b.grad) == (0.0, 4.0)


def test_aligned_replacement_runs_instead_of_the_original() -> None:
    raw: list[str] = []
    both = tool(only("linear", lambda c: c.replace_backward_op(lambda g: (g, g * 2, g * 3))))
    both.add_inst_for_op(
        lambda c: raw.append(c.op_type) if c.forward is not None else None, backward=True
    )
    x, w, b = toy.parameter(2.0), toy.parameter(3.0), toy.parameter(1.0)
    with amanda.apply(both):
        toy.backward(toy.linear(x, w, b), 7.0)
    assert (x.grad, w.grad, b.grad) == (7.0, 14.0, 21.0)
    assert raw == []


def test_the_routine_of_an_input_without_gradient_is_not_called() -> None:
    def never(*gradients: float) -> None:
        raise AssertionError("called")

    got: list[Any] = []

    def analyse(context: OpContext) -> None:
        context.insert_after_backward_op(never, grad_inputs=[0])
        context.insert_after_backward_op(lambda *g: got.append(g), grad_inputs=[0, 1])

    aligned = tool(only("linear", analyse))
    raw = tool(only("ProductBackward", analyse), backward=True, require_outputs=True)
    with amanda.apply(aligned, raw):
        toy.backward(toy.linear(toy.Value(2.0), toy.parameter(3.0)))
    assert got == [(None, 2.0), (None, 2.0)]


def test_a_routine_that_asks_for_no_gradient_is_called() -> None:
    calls: list[str] = []
    with amanda.apply(
        tool(
            only(
                "ReluBackward",
                lambda c: c.insert_before_backward_op(lambda: calls.append("x"), grad_outputs=[]),
            ),
            backward=True,
        )
    ):
        toy.backward(toy.relu(toy.parameter(3.0)))
    assert calls == ["x"]


# Sessions and threads.


def _counting() -> tuple[amanda.Tool, list[str]]:
    calls: list[str] = []
    counting = tool(
        lambda c: c.insert_before_backward_op(lambda g: calls.append("aligned"), grad_outputs=[0])
    )
    counting.add_inst_for_op(
        lambda c: c.insert_before_backward_op(lambda *g: calls.append(c.op_type)), backward=True
    )
    return counting, calls


def test_disabled_counts_as_it_stands_when_backward_is_called() -> None:
    counting, calls = _counting()
    w = toy.parameter(3.0)
    with amanda.apply(counting):
        y = toy.relu(w)
        with amanda.disabled():
            toy.backward(y)
        assert calls == []
        toy.backward(y)
    assert calls == ["aligned", "ReluBackward", "AccumulateGrad"]
    assert w.grad == 2.0


def test_backward_after_leaving_runs_no_routine_and_warns_once() -> None:
    counting, calls = _counting()
    counting.add_inst_for_op(
        only("linear", lambda c: c.insert_before_op(lambda w: toy.Value(10.0), inputs=[1]))
    )
    x, w = toy.parameter(2.0), toy.parameter(3.0)
    with amanda.apply(counting):
        y = toy.relu(toy.linear(x, w))
    with pytest.warns(AmandaWarning, match="after `apply` has ended") as warned:
        toy.backward(y)
    assert len(warned) == 1
    assert calls == []
    # The edit made in forward stays in the backward program.
    assert (x.grad, w.grad) == (10.0, 2.0)


def test_backward_belongs_to_the_session_of_its_forward_op() -> None:
    counting, calls = _counting()
    other, others = _counting()
    with amanda.apply(counting) as handle:
        y = toy.relu(toy.parameter(3.0))
        first: Session = session_of(handle)
    with amanda.apply(other), pytest.warns(AmandaWarning):
        toy.backward(y)
    assert first.closed
    assert (calls, others) == ([], [])


def test_the_first_exception_of_a_foreign_thread_is_raised_and_the_others_are_noted() -> None:
    def fail(*gradients: float) -> None:
        raise ValueError(f"with {len(gradients)}")

    failing = tool(
        lambda c: c.insert_before_backward_op(fail) if c.forward is not None else None,
        backward=True,
    )
    w = toy.parameter(3.0)
    with amanda.apply(failing):
        y = toy.relu(toy.linear(toy.Value(2.0), w))
        with pytest.raises(ValueError, match="with 1") as caught:
            toy.backward(y, background=True)
        # It does not end the session by itself, and backward was completed.
        assert toy.lost == []
        assert w.grad == 2.0
    notes = caught.value.__notes__
    assert "ReluBackward" in notes[0]
    assert [note.startswith("Then also ValueError: with 1") for note in notes] == [
        False,
        True,
        True,
    ]


def test_a_deferred_exception_that_nobody_raised_is_raised_on_leaving() -> None:
    with pytest.raises(KeyError, match="late"), amanda.apply() as handle:
        session_of(handle).defer(KeyError("late"))


def test_a_deferred_exception_that_found_its_own_way_out_carries_the_others_as_notes() -> None:
    first = ValueError("first")
    with pytest.raises(ValueError, match="first") as caught, amanda.apply() as handle:  # noqa: PT012
        session_of(handle).defer(first)
        session_of(handle).defer(KeyError("second"))
        raise first
    assert caught.value is first
    assert first.__notes__ == ["Then also KeyError: 'second'"]
    assert first.__context__ is None
