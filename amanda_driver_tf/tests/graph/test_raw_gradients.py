"""Raw edits at single backward ops, and runs that need a gradient alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.errors import RoutineResultError
from amanda_core.testing.kit.tools import Edit, editing, tool

from ..comparison import close, equal
from .reference_programs import Ops, arrays, build, double, new_session, results
from .test_gradients import VALUES, program, shifted


def raw(name: str, **routines: Any) -> amanda.Tool:
    """Return a tool that inserts at one backward op."""

    def analyse(context: OpContext) -> None:
        assert context.is_backward()
        for method, routine in routines.items():
            getattr(context, method)(routine)

    return tool(analyse, name, backward=True)


def test_raw_ops_have_their_forward_op() -> None:
    built = build(program, VALUES)
    pairs: dict[str, str | None] = {}

    def analyse(context: OpContext) -> None:
        pairs[context.name] = context.forward.name if context.forward is not None else None
        assert context.get_backward_op().name == context.name
        assert context.get_op().name == pairs[context.name] or pairs[context.name] is None

    with new_session(built.graph) as session, amanda.apply(tool(analyse, backward=True)):
        results(session, built)
    assert pairs["gradients/mm_grad/MatMul"] == "mm"
    assert pairs["gradients/mm_grad/MatMul_1"] == "mm"
    assert pairs["gradients/act_grad/TanhGrad"] == "act"
    added = [name for name, forward in pairs.items() if forward is None]
    assert added == ["gradients/AddN"]
    assert not any(name in pairs for name in ("mm", "act", "loss"))


def test_raw_output_goes_to_where_the_op_is_read() -> None:
    built = build(program, VALUES)
    with new_session(built.graph) as session:
        plain = results(session, built)
        edit = raw("gradients/mm_grad/MatMul_1", insert_after_backward_op=double)
        with amanda.apply(edit):
            close(results(session, built), [*plain[:2], plain[2] * 2])
        edit = raw(
            "gradients/mm_grad/MatMul_1", replace_backward_op=lambda a, b: tf.matmul(a, b, True) * 3
        )
        with amanda.apply(edit):
            close(results(session, built), [*plain[:2], plain[2] * 3])
        edit = raw("gradients/AddN", insert_before_backward_op=lambda *parts: None)
        with amanda.apply(edit):
            close(results(session, built), plain)


def test_raw_inputs() -> None:
    x, w = VALUES
    built = build(program, VALUES)
    with new_session(built.graph) as session:
        plain = results(session, built)
        edit = raw("gradients/act_grad/TanhGrad", insert_before_backward_op=lambda y, g: [y, g * 0])
        with amanda.apply(edit):
            found = results(session, built)
    h = np.tanh(x @ w)
    close(found, [plain[0], 2 * (h + x), np.zeros((3, 3), np.float32)])


def test_raw_and_aligned_and_forward_edits() -> None:
    x, w = VALUES
    built = build(lambda ops, x, w: ops("Sum", "loss", ops("MatMul", "mm", x, w)), VALUES)
    tools = [
        editing(Edit("mm", "before", double, 1), Edit("mm", "grad_in", lambda g: g + 1.0, 0)),
        raw("gradients/mm_grad/MatMul", insert_after_backward_op=lambda g: g * 10.0),
    ]
    with new_session(built.graph) as session, amanda.apply(*tools):
        found = results(session, built)
    ones = np.ones((3, 3), np.float32)
    close(found[1], 10 * (ones @ (2 * w).T) + 1)
    close(found[2], x.T @ ones)


def test_the_tutorials_mask_at_the_filter_gradient() -> None:
    x, w = arrays((2, 4, 4, 1), (3, 3, 1, 2))
    mask = (np.abs(w) > 0.5).astype(np.float32)
    built = build(lambda ops, x, w: ops("Sum", "loss", ops("Conv2D", "conv", x, w)), [x, w])

    def analyse(context: OpContext) -> None:
        assert context.forward is not None
        assert context.forward.op_type == "Conv2D"
        context.insert_after_backward_op(lambda g: g * mask)

    with new_session(built.graph) as session:
        plain = results(session, built)
        with amanda.apply(tool(analyse, "Conv2DBackpropFilter", backward=True)):
            found = results(session, built)
    equal(found[:2], plain[:2])
    equal(found[2], plain[2] * mask)


def test_a_raw_replacement_without_result_is_refused() -> None:
    built = build(program, VALUES)
    with (
        new_session(built.graph) as session,
        amanda.apply(raw("gradients/mm_grad/MatMul", replace_backward_op=lambda *a: None)),
        pytest.raises(RoutineResultError, match="returned None"),
    ):
        results(session, built)


# Runs that need a gradient and not its forward op.

EDITS = [
    Edit("mm", "before", double, 1),
    Edit("mm", "before", tf.sin, 1, True),
    Edit("mm", "after", double, 0),
    Edit("mm", "replace", lambda x, w: tf.matmul(x, w * w)),
    Edit("mm", "grad_in", shifted, 0),
    Edit("mm", "grad_out", shifted, 0),
    Edit("square", "before", shifted, 0),
    Edit("square", "replace", tf.exp),
    Edit("square", "backward", double),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: f"{e.name}-{e.kind}-{e.autodiff}")
def test_gradients_are_the_same_without_the_result(edit: Edit) -> None:
    def last(ops: Ops, x: Any, w: Any) -> Any:
        return ops("Sum", "loss", ops("Square", "square", ops("MatMul", "mm", x, w)))

    built = build(last, VALUES)
    result, *gradients = built.fetches
    with new_session(built.graph) as session, amanda.apply(editing(edit)):
        alone = session.run(gradients, built.feeds)
        one = [session.run(gradient, built.feeds) for gradient in gradients]
        together = session.run([result, *gradients], built.feeds)[1:]
    equal(alone, together)
    equal(one, together)
